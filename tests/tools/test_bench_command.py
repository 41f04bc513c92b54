"""`chainermn bench` with real jobs: started plainly, and inside mpiexec."""

import json

from tests.support.jobs import commands
from tests.support.jobs.scripts import ROOT

QUICK = ("bench", "--communicator", "flat", "--max-size", "1K", "--seconds", 20)


def keys_of(value: object) -> set[str]:
    own = value if isinstance(value, dict) else {}
    inner = value if isinstance(value, list) else own.values()
    return own.keys() | {key for one in inner for key in keys_of(one)}


def test_started_plainly_it_starts_ranks_and_tells_of_them(tmp_path):
    picture = tmp_path / "a picture.png"
    done = commands.chainermn(*QUICK, "-n", 2, "--json", "--plot", picture)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["correct"] is True
    assert report["ranks"] == 2
    assert {row["size"] for row in report["results"]} == {1024}
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert "mpiexec -n 2" in done.stderr
    documented = (ROOT / "docs/bench.md").read_text()
    ours = keys_of(report) - keys_of(report["packages"]) | {"problem"}
    assert {key for key in ours if f"`{key}`" not in documented} == set()


def test_inside_mpiexec_it_measures_these_ranks():
    done = commands.run(commands.BIN / "mpiexec", "-n", 3, *commands.MODULE, *QUICK)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("3 ranks on 1 node") == 1
    assert done.stdout.count("Mean of gradients") == 1
    assert done.stdout.rstrip().endswith("were right.")
