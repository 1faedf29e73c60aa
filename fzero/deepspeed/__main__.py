"""`python -m fzero.deepspeed script.py args…`: runs a script whose `import deepspeed`
gives fzero.deepspeed.

torchrun --nproc-per-node 2 -m fzero.deepspeed script.py args…
torchrun --nproc-per-node 2 -m fzero.deepspeed -m package.module args…
python -m fzero.deepspeed --no_python accelerate launch script.py args…
"""

from __future__ import annotations

import os
import runpy
import sys

from fzero.deepspeed.alias import install

USAGE = "usage: python -m fzero.deepspeed [-m | --no_python] script.py args…"


def main(words: list[str]) -> None:
    """Runs a script, a module (`-m NAME`) or another program (`--no_python NAME`),
    after `install`.
    """
    flag = words[0] if words and words[0] in ("-m", "--module", "--no_python") else ""
    given = words[1:] if flag else words
    if words[:1] in (["-h"], ["--help"]):
        print(USAGE)
        return
    if not given or given[0].startswith("-"):
        got = f"got {given[0]}; flags of the script follow its name" if given else "got none"
        sys.exit(f"python -m fzero.deepspeed: needs a script, {got}\n{USAGE}")
    if not flag and not os.path.exists(given[0]):
        sys.exit(
            f"python -m fzero.deepspeed: there is no script {given[0]}; the current folder is "
            f"{os.getcwd()}"
        )
    install(announce=True)
    if flag == "--no_python":
        os.execvp(given[0], given)
    sys.argv = given
    if flag:
        runpy.run_module(given[0], run_name="__main__", alter_sys=True)
        return
    sys.path[0] = os.path.dirname(os.path.abspath(given[0]))
    runpy.run_path(given[0], run_name="__main__")


if __name__ == "__main__":
    main(sys.argv[1:])
