"""The tests, and what starts them."""

import pytest

# Before they are imported: an `assert` of theirs explains itself, and counts.
pytest.register_assert_rewrite("tests.support")
