"""Text that somebody else wrote stays text."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from replay_lib.record.markdown import block, code, plain, table


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("a | b", "a &#124; b"),
        ("<script>x</script>", "&lt;script&gt;x&lt;/script&gt;"),
        ("<!-- notes -->", "&lt;\\!-- notes --&gt;"),
        ("`rm -rf` *now*", "\\`rm -rf\\` \\*now\\*"),
        ("[here](http://x)", "\\[here\\](http://x)"),
        ("two\nlines\x1b[31m", "two lines\\\\x1b\\[31m"),
        ("spike_snapshots _x_", "spike_snapshots \\_x\\_"),
        ("\u202eevil", "\\\\u202eevil"),
        ("a&amp;b", "a&amp;amp;b"),
    ],
)
def test_plain_text(text: str, shown: str) -> None:
    assert plain(text) == shown


@given(st.text(max_size=60))
def test_a_row_of_a_table_has_the_cells_that_it_was_given(text: str) -> None:
    written = table(["a", "b"], [[text, text]])
    assert len(written.splitlines()) == 3
    assert written.splitlines()[2].count("|") == 3
    assert "<" not in written


@given(st.text(alphabet="`a |\n\\", max_size=30))
def test_code_ends_where_it_should(text: str) -> None:
    written = code(text)
    fence = written[: len(written) - len(written.lstrip("`"))]
    inner = written[len(fence) : len(written) - len(fence)]
    assert written == f"{fence}{inner}{fence}"
    runs = [run for run in inner.replace("a", " ").replace("|", " ").split() if set(run) == {"`"}]
    assert not any(run == fence for run in runs)


def test_a_block_of_code_is_to_be_copied() -> None:
    assert block("spike-replay replay 'a  b'") == "```sh\nspike-replay replay 'a  b'\n```"
    assert block("x ``` y").splitlines()[0] == "````sh"
    assert len(block("a\n```\n<!-- notes -->").splitlines()) == 3
