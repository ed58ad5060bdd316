"""References between values."""

import pytest

from rlcore.spi import ConfigError
from rlcore_import.references import resolved


def test_references_are_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FOLDER", "/data")
    monkeypatch.setenv("NUMBER", "8")
    monkeypatch.delenv("NOTHING", raising=False)
    values = {
        "a": {"b": 3, "c": "${a.b}", "d": "${.b}", "e": {"f": "${..b}"}},
        "product": "${mul:${a.b}, 2}",
        "text": "x-${a.b}-y",
        "list": [{"n": "${a.c}"}],
        "first": "${list.0.n}",
        "indexed": "${list[0].n}${a['e'][f]}",
        "none": "${nothing}x",
        "file": "${oc.env:FOLDER}/rows",
        "unset": "${oc.env:NOTHING}/rows",
        "chosen": "${oc.select:a.z,5}",
        "quotient": "${div:7,2}",
        "nothing": "${oc.env:NOTHING,null}",
        "folder": "runs/${now:%H-%M}",
        "made": "${oc.create:{x:[1,2]}}",
        "decoded": "${oc.decode:${oc.env:NUMBER}}",
        "older": "${oc.deprecated:a.b}",
        "keys": "${oc.dict.keys:made}",
        "values": "${oc.dict.values:a.e}",
    }
    found = resolved(values)
    assert found["a"] == {"b": 3, "c": 3, "d": 3, "e": {"f": 3}}
    assert (found["product"], found["text"], found["list"], found["first"]) == (6, "x-3-y", [{"n": 3}], 3)
    assert (found["file"], found["unset"], found["chosen"], found["quotient"]) == (
        "/data/rows",
        "${oc.env:NOTHING}/rows",
        5,
        3.5,
    )
    assert (found["nothing"], found["folder"]) == (None, "runs/${now:%H-%M}")
    assert (found["indexed"], found["none"]) == ("33", "Nonex")
    assert (found["made"], found["decoded"], found["older"]) == ({"x": [1, 2]}, 8, 3)
    assert (found["keys"], found["values"]) == (["x"], [3])


@pytest.mark.parametrize("value", ["${nowhere}", "${a}", "${unknown:1}", "${div:1,0}", "${mul:x,y}", "${oc.dict.keys:oc}"])
def test_what_leads_nowhere_is_refused(value: str) -> None:
    with pytest.raises(ConfigError, match="a: found"):
        resolved({"a": value})
