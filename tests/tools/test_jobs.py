"""Programs that are run to their end or to a limit, and leave nothing behind."""

from __future__ import annotations

import os
import subprocess
import sys
import threading

import pytest

from chainermn_tools import jobs
from tests.support.jobs.processes import is_gone, soon

# Ends a test that hangs; nothing here takes so long.
LIMIT_SECONDS = 60
LONG = 3600.0


def test_a_program_says_how_it_ended_and_no_shell_reads_its_words():
    code = (
        "import sys; print(sys.argv[1], sys.stdin.read(), flush=True); sys.exit('so')"
    )
    words = [sys.executable, "-c", code, "; echo $HOME 'x'"]
    done = jobs.run(words, LIMIT_SECONDS)
    assert (done.returncode, done.stdout) == (1, "; echo $HOME 'x' \nso\n")


def test_a_program_that_ignores_its_end_is_ended_with_all_that_it_started(tmp_path):
    script = f"""
trap '' TERM
setsid sh -c 'trap "" TERM; echo $$ >> {tmp_path}/pids; sleep {LONG}' &
echo $$ >> {tmp_path}/pids
sleep {LONG}
"""
    ended = jobs.run(["sh", "-c", script], 3)
    assert ended.returncode is None
    pids = (tmp_path / "pids").read_text().split()
    assert len(pids) == 2
    assert all(is_gone(int(pid)) for pid in pids)


def test_what_a_program_leaves_behind_ends_with_it():
    ended = jobs.run(["sh", "-c", f"setsid sleep {LONG} & echo $!"], LIMIT_SECONDS)
    assert ended.returncode == 0
    assert is_gone(int(ended.stdout))


def test_the_folder_of_an_mpiexec_that_was_killed_goes_and_no_other(
    tmp_path, monkeypatch
):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    script = f"trap '' TERM; mkdir -p {tmp_path}/ompi.$$/0 {tmp_path}/ompi.other; sleep {LONG}"
    assert jobs.run(["sh", "-c", script], 1).returncode is None
    assert [path.name for path in tmp_path.iterdir()] == ["ompi.other"]


def test_at_the_end_no_program_is_left_and_none_is_started(tmp_path, monkeypatch):
    monkeypatch.setattr(jobs.tags, "_closed", False)  # and again after this test
    outcomes = []

    def work():
        outcomes.append(
            jobs.run(["sh", "-c", f"touch {tmp_path}/begun; sleep {LONG}"], LONG)
        )
        try:
            jobs.run(["true"], LONG)
        except OSError as problem:
            outcomes.append(problem.strerror)

    thread = threading.Thread(target=work, daemon=True)
    with jobs.kill_children_on_exit():
        thread.start()
        assert soon((tmp_path / "begun").exists)
    thread.join(LIMIT_SECONDS)
    killed, refused = outcomes
    assert (killed.returncode, killed.stdout) == (-9, "")
    assert refused == "no program is started any more"
    with jobs.kill_children_on_exit():
        assert jobs.run(["true"], LIMIT_SECONDS).returncode == 0


def test_only_marked_processes_are_killed():
    environment = {**os.environ, "CHAINERMN_TEST_MARK": "other"}
    bystander = subprocess.Popen(["sleep", str(LONG)], env=environment)
    try:
        for value in ("mine", "othe", "other2"):
            jobs.kill_by_env_tag(("CHAINERMN_TEST_MARK", value))
        assert bystander.poll() is None
        jobs.kill_by_env_tag(("CHAINERMN_TEST_MARK", "other"))
        assert bystander.wait(LIMIT_SECONDS) == -9
    finally:
        bystander.kill()
        bystander.wait()


@pytest.mark.parametrize(
    ("printed", "quoted"),
    [
        ("", ""),
        ("-----\nno\n  luck\n-----", ": no luck"),
        ("first " + "x" * 500 + " last", f": first {'x' * 194} ... {'x' * 195} last"),
    ],
)
def test_a_failure_is_quoted_on_one_line(printed, quoted):
    assert jobs.quote_output(printed) == quoted


def test_of_endless_output_the_beginning_and_the_end_are_kept(monkeypatch):
    monkeypatch.setattr(jobs.supervisor, "MAX_OUTPUT_BYTES", 1000)
    code = "print('first'); print('x' * 1_000_000); print('last')"
    found = jobs.run([sys.executable, "-c", code], LIMIT_SECONDS).stdout
    assert found.startswith("first\n")
    assert found.endswith("last\n")
    assert len(found) == 2000


def test_an_orphan_that_cannot_be_found_and_goes_on_writing_is_not_waited_for(
    monkeypatch,
):
    monkeypatch.setattr(jobs.supervisor, "MAX_LINGER_SECONDS", 0.3)
    endless = "while :; do echo more; sleep 0.01; done"
    found = jobs.run(["sh", "-c", f'env -i sh -c "{endless}" & echo $!'], LIMIT_SECONDS)
    assert found.returncode == 0
    # Nobody reads what it writes.
    assert soon(lambda: is_gone(int(found.stdout.split()[0])))
