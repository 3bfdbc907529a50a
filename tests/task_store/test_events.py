"""Log entries: their exact bytes, and what is rejected."""

import pytest
from engram_store import StoreError, UnsupportedFormat, VersionFacts
from engram_store.events import Entry, Published

from tests.bundles import bundle
from tests.task_store.entries import entry, published

STORED_ENTRY = (
    '{"format":1,"generation":7,"id":"07e28fd6dfc84450ae906c38465b00b4",'
    '"time":"2025-01-31T12:00:00.000Z","actor":"ada@lab",'
    '"previous":"sha256:2222222222222222222222222222222222222222222222222222222222222222",'
    '"kind":"publish",'
    '"task":"team/birds","version":2,'
    '"digest":"sha256:290bdc58b2afe4d0ba6167610d8b7e83b7be7a79ed286e28ef2b7770c2d53418",'
    '"size":900,"aliases":["default","canary"],'
    '"extends":["sha256:1111111111111111111111111111111111111111111111111111111111111111"],'
    '"task_type":"single_label","classes":3,"memory_tokens":2,"description":"naïve 猫",'
    '"backbone":"tiny-vit",'
    '"fingerprint":"sha256:abababababababababababababababababababababababababababababababab"}'
    "\n"
).encode()


def test_entry_is_read_and_written_byte_for_byte():
    made = Entry.from_json(STORED_ENTRY, 7)
    assert made.to_json() == STORED_ENTRY
    assert isinstance(made.event, Published)
    assert (made.event.version, made.event.aliases) == (2, ("default", "canary"))
    assert made.event.facts == VersionFacts(
        digest="sha256:290bdc58b2afe4d0ba6167610d8b7e83b7be7a79ed286e28ef2b7770c2d53418",
        size=900,
        extends=("sha256:" + "1" * 64,),
        task_type="single_label",
        classes=3,
        memory_tokens=2,
        description="naïve 猫",
        backbone="tiny-vit",
        fingerprint="sha256:" + "ab" * 32,
    )


@pytest.mark.parametrize(
    "data",
    [b"", b"[]", b"{}", b"null", b'{"format":1}', b"\xff\xfe", b'{"format":1,"kind":"publish"}',
     entry(8, published("t", 1)).to_json(),
     entry(7, published("t", 1)).to_json().replace(b'"size":100', b'"size":-1'),
     entry(7, published("t", 1)).to_json().replace(b"sha256:0", b"md5:0")],
)  # fmt: skip
def test_damaged_entry_is_a_value_error(data):
    with pytest.raises(ValueError):
        Entry.from_json(data, 7)


def test_unknown_keys_of_a_later_engram_are_ignored():
    made = entry(7, published("t", 1))
    data = made.to_json().replace(b'"kind"', b'"colour":"blue","kind"')
    assert Entry.from_json(data, 7) == made


@pytest.mark.parametrize("old_new", [(b'"format":1', b'"format":2'), (b'"publish"', b'"merge"')])
def test_newer_log_is_refused_not_misread(old_new, open_memory):
    store = open_memory()
    store.publish("t", bundle(1))
    path = "log/00000000000000000001.json"
    store.objects.put(path, store.objects.get(path).replace(*old_new))
    with pytest.raises(UnsupportedFormat, match="newer Engram: upgrade"):
        open_memory()
    assert issubclass(UnsupportedFormat, StoreError)
