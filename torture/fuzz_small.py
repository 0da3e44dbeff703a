"""Parsers of what a run or the cache holds beside JSON and tensors, of weights, and of texts."""

import json
from functools import partial
from pathlib import Path
from random import Random

import torch
from PIL import Image
from safetensors.torch import save_file

from nofuss.data.columns import Type, Value
from nofuss.data.corrections import corrected
from nofuss.data.open import open_data
from nofuss.errors import DataError, NofussError
from nofuss.files import OWNER, _owner, locked
from nofuss.model.backbones import fill, read_weights
from nofuss.model.embedder import build_embedder
from nofuss.model.encoder import Encoder
from nofuss.model.hub import parse_address, parse_repository
from nofuss.search.engines.url import read_url
from nofuss.search.feedback import FILE, read_feedback
from nofuss.search.filter import FilterError, as_mask, as_milvus, as_sql, encode, parse_filter
from nofuss.search.page.routes import Refused, address_of, query_of
from nofuss.search.verdict import Query
from torture.fuzz import Target

# What a run or the cache may hold beside JSON and tensors


def corrections(home: Path) -> Target:
    """Apply corrected labels."""
    for name in ("robin", "wren"):
        (home / "data" / name).mkdir(parents=True)
        Image.new("RGB", (8, 8)).save(home / "data" / name / "1.png")
    data = open_data(home / "data")

    def read(content: bytes) -> None:
        (home / "corrections.csv").write_bytes(content)
        corrected(data, home / "corrections.csv")

    seed = b"item,label,corrected\nrobin/1.png,robin,wren\nwren/1.png,wren,wren\n"
    return Target([seed], read, (b"robin", b'"', b"\0", b"\n", b",", b"\xff"))


def feedback(home: Path) -> Target:
    """Read what people said, and apply the corrected labels."""

    def read(content: bytes) -> None:
        (home / FILE).write_bytes(content)
        found = read_feedback(home)
        found.pairs()
        found.as_csv({})
        assert len(found.corrections) <= len(found.lines)

    lines: list[dict[str, object]] = [{"query": "a", "item": "b", "same": True}]
    lines += [{"query": "a", "item": "c", "same": None}]
    lines += [{"item": "a", "label": "b", "corrected": "c"}]
    return Target(["\n".join(map(json.dumps, lines)).encode()], read, (b"[" * 5000, b"\n", b"NaN"))


def locks(home: Path) -> Target:
    """Read who holds the lock of a run, and take it."""

    def read(content: bytes) -> None:
        (home / OWNER).write_bytes(content)
        assert "\n" not in _owner(home)
        with locked(home):
            pass

    seed = {"process": 1, "since": 1_700_000_000, "command": "nofuss train"}
    return Target([b"", json.dumps(seed).encode()], read, (b"NaN", b"[]", b"null"))


def weights(home: Path) -> Target:
    """Read weights into a network; a .pth may hold code."""
    module = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4))
    tensors = {name: tensor.contiguous() for name, tensor in module.state_dict().items()}
    save_file(tensors, home / "w.safetensors")
    seeds = [(home / "w.safetensors").read_bytes()]
    for is_zip in (True, False):
        torch.save(tensors, home / "w.pth", _use_new_zipfile_serialization=is_zip)
        seeds.append((home / "w.pth").read_bytes())

    def read(content: bytes) -> None:
        file = home / ("w.safetensors" if content[8:9] == b"{" else "w.pth")
        file.write_bytes(content)
        fill(module, read_weights(file), source=file)

    words = (b"cos\nsystem\n", b"ctorch\ntensor\n", b"F64", b"[3,4]", b"R", b"\x94", b"data.pkl")
    return Target(seeds, read, words)


# Texts


TYPES: dict[str, Type] = {"price": "number", "shop": "text", "day": "date", "sold": "bool"}
VALUES: dict[str, list[Value]] = {
    "price": [1.0, None, 20.0],
    "shop": ["north", "o'neill", None],
    "day": ["2024-05-01T00:00:00", None, "2024-06-01T10:00:00"],
    "sold": [True, False, None],
}


JOINS, SIGNS = (" and ", " or ", " AND "), ("==", "=", "!=", "<", "<=", ">", ">=")
SPELLED = {
    "number": ("20", "-1.5e3", "0", "1e308", ".5", "null"),
    "text": ("'north'", "'o\\'neill'", '"%s"', "'\\'", "'\0'", "'★'", "''", "'\"; --'", "null"),
    "date": ("'2024-05-01'", "'2024-05-01 10:00'", "'0001-01-01'", "'2024-13-01'"),
    "bool": ("true", "false", "null"),
}


def filters(home: Path) -> Target:
    """Parse a filter, apply it, and translate it for each database."""
    types: dict[str, Type] = {**TYPES, "label": "text"}
    columns = {name: encode(values) for name, values in VALUES.items()}
    columns["label"] = encode(["x", None, "y"])

    def read(content: bytes) -> None:
        text = content.decode("utf-8", "surrogateescape")
        try:
            where = parse_filter(text, types)
        except FilterError as error:
            raise DataError(str(error).replace("\n", " ")) from None
        as_mask(where, columns.__getitem__)
        as_milvus(where).encode("utf-8", "surrogateescape")
        sql, values = as_sql(where, types)
        assert sql.count("%s") == len(values)

    seeds = ["price<20 and shop=='north'", "not (day >= '2024-05-01' or sold) and label != 'x'"]
    seeds += [
        "shop in ('a', 'b\\'c') or price is not null",
        "`price` == -1.5e3",
        "30 > price >= 20",
    ]
    words = [*"'\"`(),%;\\\0٣", "==", "<>", "<=", "%s", "--", "1e999", "not ", " and ", " or "]
    words += ["(" * 60, "not " * 60, "'" * 999, "9" * 500, "price", "shop", "label"]
    found = [s.encode() for s in seeds], read, [word.encode() for word in words]
    return Target(
        *found, lambda draw, text: _filter(draw).encode() if draw.random() < 0.5 else text
    )


def _filter(draw: Random, depth: int = 0) -> str:
    """Return a random filter that can be read, or nearly."""
    if depth < 5 and draw.random() < 0.6:
        parts = [_filter(draw, depth + 1) for _ in range(draw.randint(1, 4))]
        return draw.choice(("({})", "not ({})", "{}")).format(draw.choice(JOINS).join(parts))
    column = draw.choice((*TYPES, "label", "`price`", "PRICE"))
    kind = TYPES.get(column.strip("`").lower(), "text")
    value = draw.choice(SPELLED[kind if draw.random() < 0.9 else draw.choice((*SPELLED,))])
    return draw.choice(
        (
            f"{column} {draw.choice(SIGNS)} {value}",
            f"{value} {draw.choice(SIGNS)} {column}",
            f"{column} not in ({value}, {value})",
            f"{column} in ({value})",
            f"{column} is null",
            f"{column} is not null",
            column,
        )
    )


def addresses(home: Path) -> Target:
    """Read addresses of models, of databases, and of pictures that were sent."""
    vector = torch.nn.functional.normalize(torch.arange(1.0, 9.0), dim=0)
    encoder = Encoder(build_embedder("identity", dim=8, channels=8), digest="0" * 64)

    def read(content: bytes) -> None:
        text, refusals = content.decode("utf-8", "surrogateescape"), list[Exception]()
        for parse in (
            parse_address,
            parse_repository,
            partial(read_url, flag="--to"),
            partial(query_of, encoder=encoder),
        ):
            try:
                parse(text)
            except NofussError as error:
                refusals.append(error)
            except Refused as error:
                refusals.append(DataError(str(error)))
        if len(refusals) == 4:
            raise refusals[0]

    seeds = [
        "hf://user/name@main",
        "user/name",
        "milvus:birds.db",
        address_of(Query(vector, 0.1), encoder),
    ]
    seeds += ["milvus://u:p%40s@host:19530/birds?tls=true", "postgresql://u@h:5432/db?table=b"]
    words = ("..", "--", "@", "//", "%00", "[::1]", ":99999", "?password=", "#", "\x1b[31m", "\n")
    return Target([s.encode() for s in seeds], read, [word.encode() for word in words])
