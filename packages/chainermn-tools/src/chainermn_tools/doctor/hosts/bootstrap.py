"""How a host that has nothing of ours comes to answer: a shell reads the program from its input.

The command that ssh passes to the host's login shell, of whatever kind, is always the same. Paths
reach the host only through the input, where a POSIX shell finds each byte written as a number. So
nothing in a path can be taken for anything else.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from chainermn_tools.doctor.hosts.remote import MARK

# For a login shell, which may be csh or fish: nothing in it is special to these.
COMMAND = "exec sh -c 'IFS= read -r code && eval \"$code\"'"
# The next line of the input is the program; it reads what follows.
LOADER = 'import json, sys; exec(compile(json.loads(sys.stdin.readline()), "doctor", "exec"))'
# Without a Python a host says in JSON what a shell can find out, each text in hexadecimal.
WITHOUT_PYTHON = """\
hex() { od -An -v -tx1 | tr -d " \\n"; }; \
there=; [ -f "$script" ] && there=yes; \
printf "\\n%s{" "$mark"; \
printf "\\"status\\": \\"%s\\", " "$(printf %s "$status" | hex)"; \
printf "\\"exists\\": \\"%s\\", " "$([ -e "$python" ] && printf yes | hex)"; \
printf "\\"other\\": \\"%s\\", " "$( (command -v python3 || command -v python) | hex)"; \
printf "\\"variables\\": \\"%s\\", " "$(env | hex)"; \
printf "\\"script\\": \\"%s\\", " "$(printf %s "$there" | hex)"; \
printf "\\"shm\\": \\"%s\\", " "$(df -Pk /dev/shm | tail -n 1 | hex)"; \
printf "\\"hostname\\": \\"%s\\"}\\n" "$(uname -n | hex)"
"""


def first_lines(python: str, script: str | None, job: dict[str, Any]) -> str:
    """What the host's shell reads: its code, the Python program, and the program's first order.

    Args:
        python: path of the interpreter that is to run the program.
        script: path of the user's script; None without one.
        job: as :mod:`chainermn_tools.doctor.hosts.remote` wants it.
    """
    code = (
        f"mark={_shell(MARK)}; python={_shell(python)}; script={_shell(script or '')}; "
        "mark=${mark%.}; python=${python%.}; script=${script%.}; "
        f"\"$python\" -c '{LOADER}'; status=$?; [ $status = 0 ] && exit 0; {WITHOUT_PYTHON}"
    )
    program = json.dumps(Path(__file__).with_name("remote.py").read_text())
    return f"{code.strip()}\n{program}\n{json.dumps({**job, 'script': script})}\n"


def _shell(text: str) -> str:
    """A shell's word for the text and a dot, which keeps newlines at the text's end."""
    octal = "".join(f"\\0{byte:03o}" for byte in text.encode(errors="surrogateescape"))
    return f"\"$(printf %b. '{octal}')\""


def without_python(answer: dict[str, str]) -> dict[str, Any]:
    """What a shell said, in the form of the Python program's facts."""
    said = {name: bytes.fromhex(text).decode(errors="replace") for name, text in answer.items()}
    lines = [line.partition("=") for line in said["variables"].splitlines()]
    return {
        "python": None,
        "status": said["status"],
        "exists": bool(said["exists"]),
        "other": said["other"].strip(),
        "variables": {name: value for name, sign, value in lines if sign},
        "script": {"there": said["script"] == "yes"},
        "shm": _shm(said["shm"].split()),
        "hostname": said["hostname"].strip(),
    }


def _shm(words: list[str]) -> dict[str, int] | None:
    """The last line of `df -Pk`: file system, size, used, free, ..."""
    if len(words) < 4 or not (words[1] + words[3]).isdigit():
        return None
    return {"total_bytes": int(words[1]) * 1024, "free_bytes": int(words[3]) * 1024}
