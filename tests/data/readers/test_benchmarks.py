"""Official layouts in miniature, and CUB itself where $NOFUSS_DATA has it."""

import os
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from scipy.io import savemat

from nofuss.data.open import open_data
from nofuss.data.split import split_collection
from nofuss.errors import DataError


@pytest.fixture
def cub(tmp_path: Path, draw) -> Path:
    """Four classes; ids out of order, so that reading by position would be seen."""
    images, labels = [], []
    for number, (image, bird) in enumerate(zip((3, 1, 4, 2, 5), (2, 1, 3, 1, 4), strict=True)):
        draw(f"cub/images/{bird:03}.bird/{image} a.png", seed=number)
        images.append(f"{image} {bird:03}.bird/{image} a.png\n")
        labels.insert(0, f"{image} {bird}\n")
    folder = tmp_path / "cub"
    (folder / "images.txt").write_text("".join(images))
    (folder / "image_class_labels.txt").write_text("".join(labels))
    (folder / "classes.txt").write_text("1 001.bird\n2 002.bird\n3 003.bird\n4 004.bird\n")
    return folder


def test_cub_is_split_into_first_and_last_half_of_its_classes(cub: Path) -> None:
    data = open_data(cub)
    assert data.labels.tolist() == [0, 0, 1, 2, 3]
    assert [path.name for path in data.paths] == [f"{i} a.png" for i in range(1, 6)]
    for path, label in zip(data.paths, data.labels, strict=True):
        assert path.parent.name == data.class_names[label]
    assert split_collection(data)[1].tolist() == [3, 4]


def test_cub_with_lines_missing_or_spoilt(cub: Path) -> None:
    (cub / "images" / "004.bird" / "5 a.png").unlink()
    with pytest.raises(DataError, match=r"1 of 5 .*5 a\.png"):
        open_data(cub)
    (cub / "image_class_labels.txt").write_text("1 1\n2 1\n3 2\n")
    with pytest.raises(DataError, match="4; 5"):
        open_data(cub)
    (cub / "images.txt").write_text("1 x.png\nbroken\n2\n")
    with pytest.raises(DataError, match=r"images\.txt .* line 2: 'broken'; line 3: '2'"):
        open_data(cub)


CARS = [("a.png", 2), ("b.png", 1), ("c.png", 4), ("d.png", 3)]


def test_cars_in_one_annotation_file(tmp_path: Path, draw) -> None:
    kind = [("relative_im_path", object), ("class", object), ("test", object)]
    rows = [(f"car_ims/{name}", number, number % 2) for name, number in CARS]
    names = np.array(["Audi", "BMW", "Ford", "Seat"], dtype=object)
    for number, (name, _) in enumerate(CARS):
        draw(f"cars/car_ims/{name}", seed=number)
    content = {"annotations": np.array(rows, dtype=kind), "class_names": names}
    savemat(tmp_path / "cars" / "cars_annos.mat", content)
    data = open_data(tmp_path / "cars")
    assert [data.class_names[label] for label in data.labels] == ["BMW", "Audi", "Seat", "Ford"]
    assert data.split.tolist() == ["train", "train", "test", "test"]


def test_cars_in_the_devkit_need_the_labels_of_both_sides(tmp_path: Path, draw) -> None:
    kind = [("bbox_x1", object), ("class", object), ("fname", object)]
    folder = tmp_path / "cars"
    (folder / "devkit").mkdir(parents=True)

    def annotate(file: Path, cars: list[tuple[str, int]], pictures: str) -> None:
        for name, number in cars:
            draw(f"cars/{pictures}/{name}", seed=number)
        rows = np.array([(1, number, name) for name, number in cars], dtype=kind)
        savemat(file, {"annotations": rows})

    annotate(folder / "devkit" / "cars_train_annos.mat", CARS[:2], "cars_train")
    with pytest.raises(DataError, match=r"cars_test_annos_withlabels\.mat"):
        open_data(folder)
    annotate(folder / "cars_test_annos_withlabels.mat", CARS[2:], "cars_test")
    names = np.array(["Audi", "BMW", "Ford", "Seat"], dtype=object)
    savemat(folder / "devkit" / "cars_meta.mat", {"class_names": names})
    data = open_data(folder)
    assert [data.class_names[label] for label in data.labels] == ["BMW", "Audi", "Seat", "Ford"]
    assert data.paths[2] == folder / "cars_test" / "c.png"
    (folder / "devkit" / "cars_train_annos.mat").write_bytes(b"not a mat file" * 20)
    with pytest.raises(DataError, match=r"cars_train_annos\.mat"):
        open_data(folder)


def test_products_are_split_as_their_files_say(tmp_path: Path, draw) -> None:
    head = "image_id class_id super_class_id path\n"
    rows = ["1 1 1 bike/a.png\n", "2 1 1 bike/b.png\n", "3 7 2 sofa/a.png\n", "4 8 2 sofa/b.png\n"]
    for name in ("bike/a", "bike/b", "sofa/a", "sofa/b"):
        draw(f"sop/{name}.png")
    (tmp_path / "sop" / "Ebay_train.txt").write_text(head + "".join(rows[:3]))
    (tmp_path / "sop" / "Ebay_test.txt").write_text(head + rows[3])
    data = open_data(tmp_path / "sop")
    assert data.split.tolist() == ["train", "train", "train", "test"]
    assert data.class_names == ("1", "7", "8")


LAYOUTS = {
    "images.txt": {"image_class_labels.txt": b"1 1\n2 2\n"},
    "image_class_labels.txt": {"images.txt": b"1 a.png\n2 b.png\n"},
    "Ebay_train.txt": {"Ebay_test.txt": b"head\n1 1 1 a.png\n"},
    "cars_annos.mat": {},
}


@pytest.mark.fuzz
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(
    st.sampled_from(sorted(LAYOUTS)), st.one_of(st.binary(), st.text("0 1a./-\n").map(str.encode))
)
def test_no_bytes_do_more_than_raise_an_error_of_data(
    tmp_path: Path, name: str, content: bytes
) -> None:
    folder = tmp_path / name
    folder.mkdir(exist_ok=True)
    for file, body in {**LAYOUTS[name], name: content}.items():
        (folder / file).write_bytes(body)
    with pytest.raises(DataError):
        open_data(folder)


def test_cub_itself_has_the_papers_counts() -> None:
    home = Path(os.environ.get("NOFUSS_DATA", ""))
    if not os.environ.get("NOFUSS_DATA") or not (home / "CUB_200_2011").is_dir():
        pytest.skip("set NOFUSS_DATA to a folder that holds CUB_200_2011")
    data = open_data(home / "CUB_200_2011")
    assert (data.num_classes, len(data)) == (200, 11_788)
    train, test = split_collection(data)
    assert (len(train), len(test)) == (5864, 5924)
    assert data.subset(train).class_names[-1] == "100.Brown_Pelican"
