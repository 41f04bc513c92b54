"""Programs that are run to their end or to a limit, and leave nothing behind."""

from __future__ import annotations

import os
import subprocess
import sys
import threading

from chainermn_tools import program
from tests.support.processes import is_gone, soon

# Ends a test that hangs; nothing here takes so long.
LIMIT_SECONDS = 60
LONG = 3600.0


def test_a_program_says_how_it_ended_and_no_shell_reads_its_words():
    code = "import sys; print(sys.argv[1], sys.stdin.read()); sys.stderr.write('so'); sys.exit(3)"
    words = [sys.executable, "-c", code, "; echo $HOME 'x'"]
    assert program.run(words, LIMIT_SECONDS) == program.Ended(3, "; echo $HOME 'x' \n", "so")
    merged = program.run(words, LIMIT_SECONDS, merged=True)
    assert (merged.err, "so" in merged.out, "$HOME" in merged.out) == ("", True, True)


def test_a_program_that_ignores_its_end_is_ended_with_all_that_it_started(tmp_path):
    script = f"""
trap '' TERM
setsid sh -c 'trap "" TERM; echo $$ >> {tmp_path}/pids; sleep {LONG}' &
echo $$ >> {tmp_path}/pids
sleep {LONG}
"""
    ended = program.run(["sh", "-c", script], 3)
    assert ended.status is None
    pids = (tmp_path / "pids").read_text().split()
    assert len(pids) == 2
    assert all(is_gone(int(pid)) for pid in pids)


def test_what_a_program_leaves_behind_ends_with_it():
    ended = program.run(["sh", "-c", f"setsid sleep {LONG} & echo $!"], LIMIT_SECONDS)
    assert ended.status == 0
    assert is_gone(int(ended.out))


def test_at_the_end_no_program_is_left_and_none_is_started(tmp_path, monkeypatch):
    monkeypatch.setattr(program, "_closed", False)  # and again after this test
    outcomes = []

    def work():
        outcomes.append(program.run(["sh", "-c", f"touch {tmp_path}/begun; sleep {LONG}"], LONG))
        try:
            program.run(["true"], LONG)
        except OSError as problem:
            outcomes.append(problem.strerror)

    thread = threading.Thread(target=work, daemon=True)
    with program.leaving_none():
        thread.start()
        assert soon((tmp_path / "begun").exists)
    thread.join(LIMIT_SECONDS)
    assert outcomes == [program.Ended(-9, "", ""), "no program is started any more"]
    with program.leaving_none():
        assert program.run(["true"], LIMIT_SECONDS).status == 0


def test_only_marked_processes_are_killed():
    environment = {**os.environ, "CHAINERMN_TEST_MARK": "other"}
    bystander = subprocess.Popen(["sleep", str(LONG)], env=environment)
    try:
        program.kill_marked("CHAINERMN_TEST_MARK", ("mine", "othe", "other2"))
        assert bystander.poll() is None
        program.kill_marked("CHAINERMN_TEST_MARK", ("mine", "other"))
        assert bystander.wait(LIMIT_SECONDS) == -9
    finally:
        bystander.kill()
        bystander.wait()
