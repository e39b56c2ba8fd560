"""Kernels run in Triton's interpreter; it is chosen when a kernel's module is imported."""

import os

os.environ["TRITON_INTERPRET"] = "1"
