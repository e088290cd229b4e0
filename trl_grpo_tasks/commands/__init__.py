"""The command line."""

import logging

# bitsandbytes reports missing optional kernels when it is imported, which other libraries do: this comes first.
logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
