"""Row formats: bytes by value."""

import ast
from pathlib import Path

import pytest

import pdkv
from pdkv.errors import ConfigError
from pdkv.geometry.row_format import INDEX_FP8, MAIN_ROWS, RowPart, main_row_format


@pytest.mark.parametrize(("name", "bytes_"), [("fp8_ds_mla", 656), ("fp8", 576), ("bf16", 1152), ("nvfp4", 352)])
def test_row_bytes(name: str, bytes_: int) -> None:
    assert MAIN_ROWS[name].row_bytes == bytes_
    assert main_row_format(name) is MAIN_ROWS[name]


def test_parts_of_the_656_byte_row() -> None:
    row = MAIN_ROWS["fp8_ds_mla"]
    assert row.part_slice("latent") == slice(0, 512)
    assert row.part_slice("scale") == slice(512, 528)
    assert row.part_slice("rope") == slice(528, 656)


@pytest.mark.parametrize("name", MAIN_ROWS)
def test_parts_tile_the_row(name: str) -> None:
    row = MAIN_ROWS[name]
    covered = [b for part in row.parts for b in range(row.row_bytes)[row.part_slice(part.name)]]
    assert covered == list(range(row.row_bytes))


def test_index_row() -> None:
    assert (INDEX_FP8.row_bytes, INDEX_FP8.order) == (132, "keys_then_scales")


def test_half_byte_elements() -> None:
    assert RowPart("latent", 512, "e2m1").bytes == 256


def test_unknown_names_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"'fp4'.*fp8_ds_mla"):
        main_row_format("fp4")
    with pytest.raises(ConfigError, match=r"'scale'.*latent, rope"):
        MAIN_ROWS["bf16"].part_slice("scale")


# --- formats are data -------------------------------------------------------------------------------------------------

PDKV = Path(pdkv.__file__).parent


def branches(source: str) -> list[str]:
    """Comparisons, match cases, look-ups and string tests that ask for a row format by its name.

    "fp8" and "bf16" are names of element types as well: where the code says that it looks at a dtype, it may.
    """
    found = []
    for node in ast.walk(ast.parse(source)):
        asked: list[ast.expr] = []
        match node:
            case ast.Compare(left=left, comparators=others):
                asked = [left, *others]
            case ast.MatchValue(value=value):
                asked = [value]
            case ast.Subscript(slice=key):
                asked = [key]
            case ast.Dict(keys=keys):
                asked = [key for key in keys if key is not None]
            case ast.Call(func=ast.Attribute(attr="startswith" | "endswith" | "get"), args=arguments):
                asked = arguments
        names = {c.value for expression in asked for c in ast.walk(expression) if isinstance(c, ast.Constant)}
        if names & set(MAIN_ROWS):
            found.append(ast.unparse(node))
    return found


def test_no_branch_on_a_formats_name() -> None:
    """Outside row_format.py a row is what its parts say."""
    found = {
        (str(path.relative_to(PDKV)), words)
        for path in PDKV.rglob("*.py")
        if path.name != "row_format.py" and "v1" not in path.parts
        for words in branches(path.read_text("utf-8"))
    }
    of_dtypes = {
        ("geometry/weights.py", "dtype == 'fp8'"),
        ("adapters/reference/quantize.py", "{'e4m3': torch.uint8, 'bf16': torch.bfloat16}"),
        ("adapters/reference/quantize.py", "dtypes == {'latent': 'e4m3', 'scale': 'f32', 'rope': 'bf16'}"),
    }
    assert found - of_dtypes == set()


@pytest.mark.parametrize(
    "code",
    [
        "if row.name == 'fp8_ds_mla': pass",
        "scaled = fmt.main_row.name in ('fp8', 'bf16')",
        "match name:\n    case 'nvfp4': pass",
        "size = {'fp8_ds_mla': 656, 'fp8': 576}[name]",
        "codec = CODECS['bf16']",
        "raw = name.startswith('fp8')",
    ],
)
def test_control_such_branches_are_found(code: str) -> None:
    assert branches(code)
