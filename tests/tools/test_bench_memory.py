"""How much memory the ranks may take."""

from pathlib import Path

from chainermn_tools.bench import memory


def cgroup(folder: Path, limit: str, used: str, value: object) -> Path:
    folder.mkdir()
    (folder / limit).write_text(f"{value}\n")
    (folder / used).write_text("600\n")
    (folder / "memory.stat").write_text("anon 1\ninactive_file 50\n")
    return folder


def test_memory_is_what_the_cgroups_leave(tmp_path, monkeypatch):
    two = cgroup(tmp_path / "v2", "memory.max", "memory.current", 1000)
    one = cgroup(tmp_path / "v1", "memory.limit_in_bytes", "memory.usage_in_bytes", 800)
    none = cgroup(tmp_path / "no", "memory.max", "memory.current", "max")
    free = {"available_bytes": 1 << 40}
    monkeypatch.setattr(memory, "memory", lambda: free)
    for folders, expected in (
        ((two,), 450),
        ((two, one), 250),
        ((none,), 1 << 40),
        ((), 1 << 40),
    ):
        monkeypatch.setattr(memory, "cgroup_folders", lambda _, found=folders: found)
        assert memory.available_bytes(2) == int(memory.SHARE * expected / 2)
    free["available_bytes"] = 10
    assert memory.available_bytes(1) == 8
