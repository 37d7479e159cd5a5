"""draftsmith: train and run language models that emit several tokens per forward pass."""

import os
import sys

if "torch" not in sys.modules:  # which reads it once; why: models/threads.py
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

__version__ = "0.1.0"
