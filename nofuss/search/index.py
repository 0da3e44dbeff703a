"""`Index`: unit vectors with names and labels, searched exactly or (faiss) approximately.

On disk a folder:

    vectors-SHA.safetensors   vectors (N, D) float32, label codes (N,), what faiss filed
    items-SHA.json            names, class names, what the caller wants kept
    manifest.json             format, kind, the two files and their sha256

The files are named after their content and the manifest is replaced last and as a whole: a crash
leaves the former index. Vectors are mapped into memory, so that opening costs no copy.
"""

import errno
import json
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from nofuss.errors import RunError, unknown_name
from nofuss.files import only_writer, sha256, sync, write_file
from nofuss.geometry import Array, as_tensor, normalize
from nofuss.search.approximate import Approximate
from nofuss.search.neighbours import nearest

FORMAT = 1
MANIFEST = "manifest.json"
Kind = Literal["exact", "approximate"]
Label = str | None


class Index:
    """Vectors that are searched by Euclidean distance on the unit sphere: 0 equal, 2 opposite.

    Vectors are scaled to unit length on their way in, and so are queries. Names are unique.
    A row is a position in `names`; rows move up when others are removed.
    """

    def __init__(
        self,
        vectors: Tensor,
        names: Sequence[str],
        labels: Sequence[Label],
        *,
        kind: Kind = "exact",
        extra: Mapping[str, Any] | None = None,
        filed: Approximate | None = None,
    ) -> None:
        self.vectors = vectors
        self.names, self.labels = list(names), list(labels)
        self.kind, self.extra = kind, dict(extra or {})
        self._filed = filed
        self._rows = {name: row for row, name in enumerate(self.names)}

    @classmethod
    def build(
        cls,
        vectors: Array,
        *,
        names: Sequence[str],
        labels: Sequence[Label] | None = None,
        kind: Kind = "exact",
        extra: Mapping[str, Any] | None = None,
    ) -> "Index":
        """An index of vectors (N, D); `extra` is anything JSON can hold, kept with it."""
        if kind not in get_args(Kind):
            raise unknown_name("kind of index", kind, get_args(Kind))
        nothing = _unit(vectors[:0])
        filed = Approximate.build(nothing) if kind == "approximate" else None
        index = cls(nothing, (), (), kind=kind, extra=extra, filed=filed)
        index.add(vectors, names=names, labels=labels)
        return index

    def __len__(self) -> int:
        return len(self.names)

    def __contains__(self, name: object) -> bool:
        return name in self._rows

    def __repr__(self) -> str:
        return f"Index({len(self):,} vectors of {self.dim} dimensions, {self.kind})"

    @property
    def dim(self) -> int:
        """Length of a vector."""
        return self.vectors.shape[1]

    def row(self, name: str) -> int:
        """Where an item stands."""
        if name not in self._rows:
            raise ValueError(f"the index holds no {name!r}")
        return self._rows[name]

    def add(
        self, vectors: Array, *, names: Sequence[str], labels: Sequence[Label] | None = None
    ) -> None:
        """Put more items at the end; a new class is nothing special."""
        x = _unit(vectors)
        labels = [None] * len(names) if labels is None else labels
        if not len(x) == len(names) == len(labels):
            raise ValueError(f"{len(x)} vectors, {len(names)} names and {len(labels)} labels")
        if x.shape[1] != self.dim:
            raise ValueError(f"got vectors of {x.shape[1]} dimensions; the index has {self.dim}")
        rows = {name: row for row, name in enumerate(names, start=len(self))}
        if len(rows) < len(names) or rows.keys() & self._rows.keys():
            twice = next(n for i, n in enumerate(names) if n in self or rows[n] != len(self) + i)
            raise ValueError(f"the index would hold {twice!r} twice; names are unique: remove it")
        self.vectors = torch.cat([self.vectors, x]) if len(self) else x
        self.names.extend(names)
        self.labels.extend(labels)
        self._rows |= rows
        if self._filed is not None:
            if self._filed.outgrown(len(self)):
                self._filed = Approximate.build(self.vectors)
            else:
                self._filed.add(x)

    def remove(self, names: Iterable[str]) -> None:
        """Take items out; those after them move up."""
        gone = {self.row(name) for name in names}
        if not gone:
            return
        kept = [row for row in range(len(self)) if row not in gone]
        self.vectors = self.vectors[kept]
        self.names = [self.names[row] for row in kept]
        self.labels = [self.labels[row] for row in kept]
        self._rows = {name: row for row, name in enumerate(self.names)}
        if self._filed is not None:
            self._filed.refill(self.vectors)

    def as_kind(self, kind: Kind) -> "Index":
        """The same items in an index of this kind."""
        if kind == self.kind:
            return self
        return Index.build(
            self.vectors, names=self.names, labels=self.labels, kind=kind, extra=self.extra
        )

    def search(self, queries: Array, k: int = 10) -> tuple[Tensor, Tensor]:
        """Distances and rows (Q, k) of the nearest, ties by row; fewer where there are fewer.

        An approximate index may find fewer than k: inf and −1 fill up.
        """
        if k < 1:
            raise ValueError(f"k is {k}; expected 1 or more")
        q = _unit(queries)
        if q.shape[1] != self.dim:
            raise ValueError(f"got queries of {q.shape[1]} dimensions; the index has {self.dim}")
        if self._filed is not None and len(self):
            return self._filed.search(q, self.vectors, min(k, len(self)))
        return nearest(q, self.vectors, k)

    def save(self, folder: str | Path) -> None:
        """Write the folder; an index that is there already is replaced as a whole."""
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        classes = sorted({label for label in self.labels if label is not None})
        code = {label: i for i, label in enumerate(classes)}
        codes = [-1 if label is None else code[label] for label in self.labels]
        tensors = {"vectors": self.vectors.contiguous(), "labels": torch.tensor(codes).long()}
        if self._filed is not None:
            tensors["faiss"] = self._filed.to_bytes()
        items = {"names": self.names, "classes": classes, "extra": self.extra}
        with only_writer(folder):
            self._write(folder, tensors, items)

    def _write(self, folder: Path, tensors: dict[str, Tensor], items: dict[str, Any]) -> None:
        new = folder / ".vectors.new"
        try:
            try:
                save_file(tensors, new)
            except SafetensorError as error:  # of a full or failing disk
                raise OSError(errno.EIO, str(error), str(new)) from None
            sync(new)
            checksums = {"vectors": sha256(new)}
            new.rename(folder / _file("vectors", checksums))
        finally:
            new.unlink(missing_ok=True)
        new = folder / ".items.new"
        write_file(new, json.dumps(items))  # escapes: names may hold bytes that are no UTF-8
        checksums["items"] = sha256(new)
        new.rename(folder / _file("items", checksums))
        manifest = {"format": FORMAT, "kind": self.kind, "sha256": checksums}
        write_file(folder / MANIFEST, json.dumps(manifest, indent=2) + "\n")
        current = {_file("vectors", checksums), _file("items", checksums)}
        for file in chain(folder.glob("vectors-*.safetensors"), folder.glob("items-*.json")):
            if file.name not in current:
                file.unlink(missing_ok=True)

    @classmethod
    def load(cls, folder: str | Path) -> "Index":
        """Open a folder that `save` wrote; every byte is checked first."""
        folder = Path(folder)
        if not (folder / MANIFEST).is_file():
            raise RunError(f"no index in {folder}: no {MANIFEST}; make one: nofuss index RUN DIR")
        try:
            manifest = json.loads((folder / MANIFEST).read_bytes())
            found, kind, checksums = manifest["format"], manifest["kind"], manifest["sha256"]
            if found != FORMAT or kind not in get_args(Kind):
                raise RunError(
                    f"{folder} holds an index of format {found}, expected {FORMAT}; "
                    "open it with the version of nofuss that wrote it, or make it again"
                )
            files = {part: folder / _file(part, checksums) for part in ("vectors", "items")}
            for part, file in files.items():
                if sha256(file) != checksums[part]:
                    raise ValueError(f"{file.name} does not match its checksum")
            items = json.loads(files["items"].read_bytes())
            with safe_open(files["vectors"], framework="pt") as tensors:
                vectors, codes = tensors.get_tensor("vectors"), tensors.get_tensor("labels")
                filed = None
                if kind == "approximate":
                    filed = Approximate.from_bytes(tensors.get_tensor("faiss"))
            labels = [None if c < 0 else items["classes"][c] for c in codes.tolist()]
            names = items["names"]
            if vectors.ndim != 2 or not len(vectors) == len(names) == len(labels):
                raise ValueError("its parts differ in length")
            return cls(vectors, names, labels, kind=kind, extra=items["extra"], filed=filed)
        except RunError:
            raise
        except Exception as error:  # whatever foreign bytes make their readers raise
            raise RunError(
                f"the index in {folder} is damaged ({type(error).__name__}: {error}); delete the "
                "folder and make it again: nofuss index RUN DIR"
            ) from None


def _file(part: str, checksums: Mapping[str, str]) -> str:
    suffix = {"vectors": "safetensors", "items": "json"}[part]
    short = checksums[part][:16]
    if not short.isalnum():  # a damaged manifest must not lead out of the folder
        raise ValueError(f"{short!r} is no checksum")
    return f"{part}-{short}.{suffix}"


def _unit(vectors: Array) -> Tensor:
    """Float32 directions (N, D) in this process's memory; NaN and infinity are refused."""
    x = as_tensor(vectors)
    if x.ndim != 2 or not x.shape[1]:
        raise ValueError(f"got vectors of shape {tuple(x.shape)}; expected (N, D)")
    x = x.detach().to("cpu", torch.float32)
    if not x.isfinite().all():
        raise ValueError("vectors hold NaN or infinity")
    return normalize(x).contiguous()
