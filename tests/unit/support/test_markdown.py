"""Test the Markdown reader of the documentation tests."""

from tests.support.markdown import Block, blocks, broken_rows, headings, links, spans, table_rows

PAGE = """# A title with `code` & more

<!-- run:
rooms status
-->
Text with `<!-- no comment -->` and `rooms status`.

1. An item:
   ```sh
   rooms room list
     indented
   ```

````text
```
inner
```
````

See [a](b.md#c), ![d](e.png "title") and [f]: not `[g](h)`.

[i]: j.md
"""


def test_blocks_and_comments_come_in_their_order() -> None:
    assert list(blocks(PAGE)) == [
        Block(line=3, language=None, text="run:\nrooms status"),
        Block(line=9, language="sh", text="rooms room list\n  indented\n"),
        Block(line=14, language="text", text="```\ninner\n```\n"),
    ]


def test_inline_code_has_its_line() -> None:
    assert (6, "rooms status") in spans(PAGE)


def test_links_leave_code_out() -> None:
    assert links(PAGE) == ["b.md#c", "e.png", "j.md"]


def test_headings_become_anchors_of_the_site_and_of_github() -> None:
    assert headings(PAGE) == {"a-title-with-code-more", "a-title-with-code--more"}


TABLE = r"""
| a | b |
| --- | --- |
| `x\|y` | 1 |
| `x|y` | 2 |
| 3 |
 4 |

Text with a | sign.
| c |
"""


def test_rows_have_their_cells() -> None:
    assert list(table_rows(TABLE))[:3] == [
        (2, ["a", "b"]),
        (3, ["---", "---"]),
        (4, [r"`x\|y`", "1"]),
    ]


def test_rows_that_are_cut_or_too_long_are_broken() -> None:
    assert broken_rows(TABLE) == [5, 6, 7]
