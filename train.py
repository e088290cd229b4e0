"""Train a language model on a task with GRPO: accelerate launch train.py TASK [--option value ...] (-h for help)"""

import sys

from trl_grpo_tasks.commands.train import main

if __name__ == "__main__":
    sys.exit(main())
