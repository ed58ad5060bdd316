"""What tests take for granted of the process that runs them."""

import os
import signal

# TransformerEngine's products of float32 round to TF32 otherwise. Read when CUDA's libraries are loaded, here or in workers.
os.environ.setdefault("NVIDIA_TF32_OVERRIDE", "0")
# A shell without job control has what it starts in the background ignore Ctrl-C, and everything that this starts too.
signal.signal(signal.SIGINT, signal.default_int_handler)
