"""CSV manifests and CSVs of triplets."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from nofuss.data.open import open_data
from nofuss.errors import DataError


def table(folder: Path, text: str | bytes, name: str = "list.csv") -> Path:
    file = folder / name
    file.write_bytes(text if isinstance(text, bytes) else text.encode())
    return file


def test_a_manifest_gives_paths_labels_and_split(photos: Path) -> None:
    rows = "path,label,split\nrobin/0.png,10,train\ntit/0.png,9,test\n\nwren/1.png,10,Train\n"
    data = open_data(table(photos, rows))
    assert data.class_names == ("9", "10")
    assert data.labels.tolist() == [1, 0, 1]
    assert data.split.tolist() == ["train", "test", "train"]
    assert data.names == ("robin/0.png", "tit/0.png", "wren/1.png")


@pytest.mark.parametrize(
    "rows",
    [
        '\ufeffLabel;Path\r\n"big bird";robin/0.png\r\nb;tit/0.png\r\n',
        "id\tlabel\tpath\n1\tbig bird\trobin/0.png\n2\tb\ttit/0.png\n",
    ],
)
def test_columns_in_any_order_and_the_usual_separators(photos: Path, rows: str) -> None:
    data = open_data(table(photos, rows))
    assert data.class_names == ("b", "big bird")
    assert [path.parent.name for path in data.paths] == ["robin", "tit"]
    assert data.split is None


def test_bad_rows_are_listed_by_number_five_at_most(photos: Path) -> None:
    rows = "path,label,split\nrobin/0.png,,train\n,a,train\nrobin/0.png,a,maybe\n"
    rows += "".join(f"gone/{i}.png,a,test\n" for i in range(4))
    with pytest.raises(DataError, match=r"row 2: .* row 6: .*gone/1\.png.*7 in all") as caught:
        open_data(table(photos, rows))
    assert "row 7" not in str(caught.value)


@pytest.mark.parametrize(
    ("rows", "complaint"),
    [
        ("", "list.csv"),
        ("file,label\nx,y\n", "path"),
        ("path,label\n", "list.csv"),
        ('path,label\n"robin/0.png,a\n', "list.csv"),
        (b"path,label\nrobin\0/0.png,a\n", "row 2|list.csv"),
        (b"path,label\nrobin/\xff.png,a\n", "row 2: .*robin/\udcff.png"),
        ("path,label\nrobin,a\n", "row 2: robin"),
        ("path,label\n" + 300 * "x" + ",a\n", "row 2: x+"),
        ("x" * 2**20, "list.csv"),
        ("path,label\n" + "x" * 2**20, "list.csv"),
    ],
)
def test_broken_manifests_are_one_line(photos: Path, rows: str | bytes, complaint: str) -> None:
    with pytest.raises(DataError, match=complaint) as caught:
        open_data(table(photos, rows))
    assert "\n" not in str(caught.value)


@pytest.mark.fuzz
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(st.one_of(st.binary(), st.binary().map(lambda tail: b"path,label,split\n" + tail)))
def test_no_bytes_do_more_than_raise_an_error_of_data(tmp_path: Path, content: bytes) -> None:
    with pytest.raises(DataError):
        open_data(table(tmp_path, content))


def test_triplets_name_each_picture_once(photos: Path) -> None:
    rows = "anchor,positive,negative\nrobin/0.png,robin/1.png,tit/0.png\n"
    rows += "tit/0.png,tit/1.png,robin/1.png\n"
    data = open_data(table(photos, rows))
    named = np.array(data.names)[data.comparisons.rows]
    assert named.tolist() == [
        ["robin/0.png", "robin/1.png", "tit/0.png"],
        ["tit/0.png", "tit/1.png", "robin/1.png"],
    ]
    assert len(data) == 4
    assert not data.is_labelled


@pytest.mark.parametrize(
    ("row", "complaint"),
    [
        ("robin/0.png,robin/1.png,gone.png", "row 2: .*gone.png"),
        ("robin/0.png,,tit/0.png", "row 2: .*positive"),
        ("robin/0.png,tit/0.png,tit/0.png", "row 2: .*negative"),
    ],
)
def test_triplets_that_can_not_be_used(photos: Path, row: str, complaint: str) -> None:
    with pytest.raises(DataError, match=complaint):
        open_data(table(photos, f"anchor,positive,negative\n{row}\n"))


def test_pairs_name_each_picture_once(photos: Path) -> None:
    rows = "a,b,same\nrobin/0.png,robin/1.png,1\ntit/0.png,robin/1.png,No\n"
    data = open_data(table(photos, rows + "robin/1.png,robin/0.png,true\n"))
    assert np.array(data.names)[data.comparisons.items].tolist() == [
        ["robin/0.png", "robin/1.png"],
        ["robin/1.png", "tit/0.png"],
    ]
    assert data.comparisons.rows[:, 2].tolist() == [1, 0]


@pytest.mark.parametrize(
    ("rows", "complaint"),
    [
        ("robin/0.png,robin/1.png,maybe", "row 2: same is 'maybe'"),
        ("robin/0.png,,1", "row 2: no b"),
        ("robin/0.png,robin/0.png,1", "row 2: a and b"),
        ("robin/0.png,gone.png,1", "row 2: .*gone.png"),
        ("robin/0.png,robin/1.png,1\nrobin/1.png,robin/0.png,0", "row 3: .*row 2"),
        ("robin/0.png,robin/1.png,1", "different"),
        ("robin/0.png,tit/1.png,0", "alike"),
        ("", "a,b,same"),
    ],
)
def test_broken_pairs_are_one_line(photos: Path, rows: str, complaint: str) -> None:
    with pytest.raises(DataError, match=complaint) as caught:
        open_data(table(photos, f"a,b,same\n{rows}\n"))
    assert "\n" not in str(caught.value)


def test_labels_with_leading_zeros_are_names(photos: Path) -> None:
    rows = "path,label\nrobin/0.png,007\ntit/0.png,7\nwren/1.png,10\n"
    data = open_data(table(photos, rows))
    assert data.class_names == ("007", "10", "7")
    assert data.labels.tolist() == [0, 2, 1]


def test_repeated_rows_are_one_item_and_contradictions_are_named(photos: Path) -> None:
    rows = "path,label,shop\nrobin/0.png,a,x\ntit/0.png,b,y\ntit/../robin/0.png,a,z\n"
    data = open_data(table(photos, rows))
    assert len(data) == 2
    assert data.notes == ("1 rows repeat a picture: row 4",)
    assert data.columns["shop"].values == ["x", "y"]
    with pytest.raises(DataError, match=r"row 4: robin/0\.png"):
        open_data(table(photos, "path,label\nrobin/0.png,a\ntit/0.png,b\nrobin/0.png,c\n"))
    both = "path,label,split\nrobin/0.png,a,query\nrobin/0.png,a,gallery\nrobin/1.png,a,gallery\n"
    assert len(open_data(table(photos, both))) == 3  # a query may be in the gallery too


def test_more_cells_than_columns_are_named(photos: Path) -> None:
    with pytest.raises(DataError, match="row 3"):
        open_data(table(photos, "path,label\nrobin/0.png,a,\ntit/0.png,tit, blue\n"))
    with pytest.raises(DataError, match="label twice"):
        open_data(table(photos, "path,label,label\nrobin/0.png,a,b\n"))
