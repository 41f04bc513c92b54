"""Makes the pictures of what programs of this repository draw and print, by running them.

    python docs/figures/pictures.py

Plots are those that the programs save, in fewer colours. Output is what they print on a
terminal of 100 columns. A run takes about two minutes; on a busy machine the times in
the pictures are longer.
"""

from __future__ import annotations

import fcntl
import os
import pty
import re
import struct
import subprocess
import sys
import tempfile
import termios
from io import StringIO
from pathlib import Path

from PIL import Image
from rich.console import Console
from rich.text import Text

FIGURES = Path(__file__).resolve().parent
ROOT = FIGURES.parents[1]
COLUMNS = 100
RAISES = """\
import chainermn

comm = chainermn.create_communicator()
if comm.rank == 1:
    raise ValueError("no labels in batch 7")
comm.allreduce_obj(1)
"""


def curves(folder: Path) -> None:
    """Loss and accuracy of the example, on two ranks."""
    script = ROOT / "examples/mnist/train_mnist.py"
    run(folder, "mpiexec", "-n", "2", sys.executable, str(script), "--out", ".")
    keep(folder / "curves.png")


def bench(folder: Path) -> None:
    """The time of a call by size."""
    names = [f"--communicator={name}" for name in ("hierarchical", "flat", "naive")]
    run(folder, "chainermn", "bench", "-n", "2", *names, "--plot", "bench.png")
    keep(folder / "bench.png")


def doctor(folder: Path) -> None:
    """All checks of a machine, with a warning and its fix."""
    terminal(folder, "doctor", "chainermn doctor", OMP_NUM_THREADS="8")


def verdict(folder: Path) -> None:
    """A job in which one rank raises."""
    (folder / "train.py").write_text(RAISES)
    terminal(folder, "verdict", "chainermn launch -n 2 train.py", OMP_NUM_THREADS="1")


def environment(variables: dict[str, str]) -> dict[str, str]:
    """This process's variables without those that change what programs do or print."""
    ours = re.compile(r"CHAINERMN_|OMP_|NO_COLOR|FORCE_COLOR|COLUMNS|LINES")
    kept = {name: value for name, value in os.environ.items() if not ours.match(name)}
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    return kept | {"PATH": path, "TERM": "xterm-256color"} | variables


def run(folder: Path, *command: str, **variables: str) -> None:
    subprocess.run(command, cwd=folder, env=environment(variables), check=True)


def keep(picture: Path) -> None:
    """Copy a PNG file with 64 colours, which plots hardly have."""
    with Image.open(picture) as image:
        image.convert("RGB").quantize(64).save(FIGURES / picture.name, optimize=True)


def terminal(folder: Path, name: str, command: str, **variables: str) -> None:
    """Run a command on a terminal, and draw what it shows."""
    child, terminal = pty.fork()
    if child == 0:
        try:
            fcntl.ioctl(0, termios.TIOCSWINSZ, struct.pack("4H", 50, COLUMNS, 0, 0))
            os.chdir(folder)
            os.execvpe(command.split()[0], command.split(), environment(variables))
        finally:
            os._exit(127)
    output = b""
    try:
        while part := os.read(terminal, 65536):
            output += part
    except OSError:  # Linux says so that nobody has the terminal open any more
        pass
    os.close(terminal)
    if os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 127:
        raise SystemExit(f"could not run {command}")
    shown = output.decode().replace("\r\n", "\n")
    # Where packages and programs are is different for every reader.
    for path in (*map(str, ROOT.glob("packages/*/src")), str(ROOT / "src"), str(ROOT)):
        shown = shown.replace(path, "~" if path == str(ROOT) else "~/.venv/lib")
    console = Console(record=True, width=COLUMNS, file=StringIO())
    console.print(Text.from_ansi(f"$ {command}\n{shown.rstrip()}"))
    svg = console.export_svg(title=command, unique_id=name)
    # rich names fonts that a browser would fetch.
    svg = re.sub(r"@font-face \{.*?\}\s*|<!--.*?-->\s*", "", svg, flags=re.DOTALL)
    (FIGURES / f"{name}.svg").write_text(svg)


def main() -> None:
    for draw in (curves, bench, doctor, verdict):
        with tempfile.TemporaryDirectory() as folder:
            draw(Path(folder))


if __name__ == "__main__":
    main()
