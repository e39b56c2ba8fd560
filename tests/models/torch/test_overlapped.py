"""Overlapped exchanges on one rank; test_split.py has several."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from support.checkpoints import make_checkpoint

os.environ["TRITON_INTERPRET"] = "1"

from weft.kernels.gpu.runtime.arguments import KernelError
from weft.kernels.interpreter.gpu import installed
from weft.kernels.symmetric.virtual import VirtualHome, VirtualWorld
from weft.models.checkpoint.locate import read_spec
from weft.models.spec.layout import Layout
from weft.models.torch.gpu_model import GpuModel
from weft.models.torch.overlapped import Overlapped
from weft.models.torch.runner import TorchRunner


def test_a_wait_that_has_run_out_fails_the_step(tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path, "llama", num_hidden_layers=1)
    spec = read_spec(path)
    with installed():
        runner = TorchRunner.load(
            path,
            spec,
            dtype="float32",
            block_size=4,
            max_num_seqs=1,
            max_num_batched_tokens=16,
            max_model_len=16,
            home=VirtualHome(VirtualWorld(1), 0),
        )
        runner.allocate_kv_cache(1)
        runner.warm_up()
        assert isinstance(runner._model, GpuModel)
        home = VirtualHome(VirtualWorld(1), 0)
        made = Overlapped(home, None, spec, Layout(), torch.float32, 16)
        runner._model.exchange = made
        runner.warm_up()
        made.faults()[-1][:] = torch.tensor([0, 3, 7, 6])
        with pytest.raises(KernelError, match="rank 0 gave up waiting for its signal 3 to reach 7"):
            runner.warm_up()
        runner.warm_up()
