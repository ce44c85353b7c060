from pathlib import Path

from pdkv.machine.files import chosen, entries, id_list, number, text


def test_what_is_not_there_is_the_default(tmp_path: Path) -> None:
    missing = tmp_path / "missing"
    assert (text(missing, "x"), number(missing, 7), entries(missing), chosen(missing)) == ("x", 7, (), "")
    assert (text(tmp_path), number(tmp_path)) == ("", None)


def test_what_is_there_is_read(tmp_path: Path) -> None:
    file = tmp_path / "b"
    file.write_text("always [madvise] never 12\n")
    (tmp_path / "a").write_text("-1\n")
    assert (text(file), number(file), chosen(file)) == ("always [madvise] never 12", 12, "madvise")
    assert number(tmp_path / "a") == -1
    assert entries(tmp_path) == (tmp_path / "a", file)


def test_lists_of_ids() -> None:
    assert id_list("0-3,8") == {0, 1, 2, 3, 8}
    assert id_list("5") == {5}
    assert id_list("") == id_list("x") == frozenset()
