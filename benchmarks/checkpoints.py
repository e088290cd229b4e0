"""Size of checkpoints and seconds to write them, by the number of processes.

    python benchmarks/checkpoints.py [--task brick] [--processes 1 2]

A tiny model of the task trains for a few steps with full weights, a moving reference, replay and the constraint. Some
files of a checkpoint are written once: weights, optimizer, reference. Others are written by each process: random
states, the replay buffer, and, if a checkpoint falls within a rollout, that rollout and its masks. Sizes are those
between rollouts, except for the column "rollout under way", which a process adds within one. Prints a Markdown table
and writes benchmarks/results/checkpoints.json.
"""

from __future__ import annotations

import json
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from harness import Report, free_port, run_table, table_parser

COLUMNS = {
    "processes": "processes",
    "once MB": "once_mb",
    "reference MB": "reference_mb",
    "per process MB": "process_mb",
    "rollout under way MB": "rollout_mb",
    "seconds": "seconds",
}


def main() -> None:
    parser = table_parser(__doc__, __file__, limit=400)
    parser.add_argument("--task", default="brick")
    parser.add_argument("--processes", type=int, nargs="+", default=[1, 2], help="numbers of processes to run")
    parser.add_argument("--replay", type=int, default=16, help="groups in the replay buffer of a process")
    parser.add_argument("--group", type=int, default=8, help="completions per prompt")
    parser.add_argument("--prompts", type=int, default=4, help="prompts per rollout and process")
    parser.add_argument("--length", type=int, default=128, help="tokens per completion, at most")
    parser.add_argument("--steps", type=int, default=12, help="steps, of which every second ends a rollout")
    options = parser.parse_args()
    cells = [{"processes": count} for count in sorted(options.processes)]
    run_table("checkpoints", cells, options, COLUMNS)


def measure(report: Report, options: Any, processes: int) -> None:
    """Train in `processes` processes and report the sizes of the last two checkpoints and the times of all."""
    import torch.multiprocessing

    from trl_grpo_tasks import get_task
    from trl_grpo_tasks.models.tiny import save_tiny

    with tempfile.TemporaryDirectory() as folder:
        port = free_port()
        spec = get_task(options.task).tiny()
        assert spec is not None, "the task has no tiny model"
        save_tiny(spec, Path(folder) / "model")
        torch.multiprocessing.spawn(_train, (options, processes, folder, port), nprocs=processes)
        within, between = (_sizes(Path(folder) / "run" / f"checkpoint-{options.steps - n}") for n in (1, 0))
        times = json.loads((Path(folder) / "seconds.json").read_text())
    report(
        {
            "once_mb": (sum(between.values()) - _of_processes(between)) / 1e6,
            "reference_mb": between["task_state_common.pt"] / 1e6,
            "process_mb": _of_processes(between) / processes / 1e6,
            "rollout_mb": (_of_processes(within) - _of_processes(between)) / processes / 1e6,
            "seconds": statistics.median(times),
        }
    )


def _sizes(checkpoint: Path) -> dict[str, int]:
    return {path.name: path.stat().st_size for path in checkpoint.rglob("*") if path.is_file()}


def _of_processes(sizes: dict[str, int]) -> int:
    """Bytes of the files that every process writes."""
    own = ("task_state_", "rng_state")
    return sum(size for name, size in sizes.items() if name.startswith(own) and name != "task_state_common.pt")


def _train(rank: int, options: Any, processes: int, folder: str, port: int) -> None:
    """Train in one process; the main process writes the seconds that its checkpoints took."""
    os.environ |= {"ACCELERATE_USE_CPU": "true", "TOKENIZERS_PARALLELISM": "false"}
    if processes > 1:
        ranks = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": processes, "LOCAL_WORLD_SIZE": processes}
        os.environ |= {name: str(value) for name, value in ranks.items()}
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    import torch

    from trl_grpo_tasks import TaskGRPOConfig, TaskGRPOTrainer, get_task

    torch.set_num_threads(1)
    times: list[float] = []

    class Timed(TaskGRPOTrainer):
        def _save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
            start = time.perf_counter()
            super()._save_checkpoint(*args, **kwargs)
            if self.state.global_step % 2 == 0:  # between rollouts
                times.append(time.perf_counter() - start)

    settings = TaskGRPOConfig(
        output_dir=f"{folder}/run", max_steps=options.steps, num_generations=options.group,
        per_device_train_batch_size=options.group * options.prompts // 2, steps_per_generation=2,
        gradient_accumulation_steps=1, max_completion_length=options.length, train_rows=64, eval_rows=2,
        constrain=True, rollout="fast", beta=0.04, reference_mode="ema", replay_size=options.replay,
        reward_workers=0, save_strategy="steps", save_steps=1, save_total_limit=2,
        use_cpu=True, bf16=False, gradient_checkpointing=False, report_to="none", disable_tqdm=True,
    )  # fmt: skip
    trainer = Timed(f"{folder}/model", args=settings, task=get_task(options.task))
    trainer.train()
    assert trainer.extras["replay"].state is not None
    print(f"process {rank}: {len(trainer.extras['replay'].state)} groups in the replay buffer")
    if trainer.accelerator.is_main_process:
        (Path(folder) / "seconds.json").write_text(json.dumps(times))


if __name__ == "__main__":
    main()
