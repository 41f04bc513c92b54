"""What tests share, each once: jobs, models, doubles, hosts, and what a test must do."""

import pytest

# Before they are imported: an `assert` of theirs explains itself, and counts.
pytest.register_assert_rewrite("tests.support")
