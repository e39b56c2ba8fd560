"""How far quantised copies of the bundled model differ from it: python benchmarks/quantize.py.

The text is chats with held-out questions and their answers, as `weft quantize --text` reads it. The
calibration text of AWQ has other questions. Prints one row of a Markdown table for each format.
"""

from __future__ import annotations

import argparse
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from tempfile import TemporaryDirectory

from weft.models.bundled.tasks import TASKS, held_out
from weft.models.spec.schemes import SCHEMES
from weft.serving.cli.quantize import run
from weft.serving.config.settings import EngineConfig

LEFT_OUT = ("needle", "tool_call")
"""Tasks with long filler, and with tools."""
QUESTIONS = {"text": (6, 0), "calibration": (12, 5)}
"""Questions of each task, and their seed."""


def chats(count: int, seed: int) -> str:
    """Return chats with questions of each task, in the bundled models' template."""
    turns = []
    for task in TASKS:
        for question in held_out(task, count, seed) if task not in LEFT_OUT else ():
            answer = {"role": "assistant", "content": question.answer}
            turns += [*question.messages, answer]
    return "".join(f"<|im_start|>{turn['role']}\n{turn['content']}<|im_end|>\n" for turn in turns)


def main() -> None:
    """Write the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="weft-demo")
    config = EngineConfig(model=parser.parse_args().model)
    print("| format | size | KL divergence |\n| --- | --- | --- |", flush=True)
    with TemporaryDirectory() as folder:
        for name, content in QUESTIONS.items():
            Path(folder, name).write_text(chats(*content))
        text, calibration = Path(folder, "text"), Path(folder, "calibration")
        for form in SCHEMES:
            is_int4 = form.startswith("W4")
            for method in ("rtn", "awq") if is_int4 else ("rtn",):
                said = StringIO()
                with redirect_stdout(said):
                    run(
                        config,
                        Path(folder, f"{form}-{method}"),
                        form=form,
                        group_size=64 if is_int4 else None,
                        method=method,
                        calibration=calibration if method == "awq" else None,
                        text=text,
                    )
                size, *_, divergence = said.getvalue().splitlines()
                title = f"`{form}`" + (", `--method awq`" if method == "awq" else "")
                bytes_after = size.rpartition("-> ")[2]
                print(f"| {title} | {bytes_after} | {divergence.split()[2]} |", flush=True)


if __name__ == "__main__":
    main()
