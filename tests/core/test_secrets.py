"""Secrets are masked in every form of text, and child processes get only those that are named."""

import base64
import json
import sys
from typing import Any
from urllib.parse import quote

import pytest

from rlcore.secrets import (
    child_environment,
    is_secret_name,
    keep_secret,
    keep_secrets,
    masked,
    masked_keys,
    masked_table,
    unset_problems,
)

KEY = 'vq81/zx9q+"kw7p"'  # no word of it is a secret that another test has kept


@pytest.fixture(autouse=True)
def known(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hide the command line of the test run, whose secrets `masked` knows."""
    monkeypatch.setattr(sys, "argv", ["rlcore"])


@pytest.mark.parametrize(
    "form", [KEY, quote(KEY, safe=""), json.dumps(KEY), json.dumps(json.dumps(KEY)), f"'{KEY}'", f"({KEY}{KEY})"], ids=str
)
@pytest.mark.parametrize("source", ["environment", "option", "option=", "override", "kept"])
def test_a_known_secret_is_masked_in_each_form(source: str, form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    text = f"the endpoint says: no such key {form}"
    if source == "kept":
        text = text.replace("vq81", "kept")
        keep_secret(KEY.replace("vq81", "kept"))
    else:
        assert masked(text) == text
    if source == "environment":
        monkeypatch.setenv("SOME_API_KEY", KEY)
    elif source != "kept":
        arguments = {
            "option": ["--api-key", KEY],
            "option=": [f"--api-key={KEY}"],
            "override": [f"environment.mine.api_key={KEY}"],
        }
        monkeypatch.setattr(sys, "argv", ["rlcore", *arguments[source]])
    assert "zx9q" not in masked(text)
    assert "the endpoint says: no such key" in masked(text)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("http://user:word@host/v1 and https://token@host", "http://***@host/v1 and https://***@host"),
        ("rlcore serve --api-key x1", "rlcore serve --api-key ***"),
        ("rlcore serve --hf-token=x1 --port 1", "rlcore serve --hf-token=*** --port 1"),
        ("password=x1, next", "password=***, next"),
        ('{"api_key": "x1", "a": 1}', '{"api_key": ***, "a": 1}'),
        ("{'Authorization': 'Basic x1'}", "{'Authorization': ***}"),
        ("Authorization: Bearer abcdefgh1", "Authorization: Bearer ***"),
        ("Incorrect API key provided: sk-abcdefghijklmnop.", "Incorrect API key provided: ***."),
        ("hf_abcdefghijklmnopqrst AIzaSyA1234567890123456789012345678901 gsk_abcdefghijklmnopqrst", "*** *** ***"),
        ("-----BEGIN RSA PRIVATE KEY-----\nMIIabc\n-----END RSA PRIVATE KEY-----, next", "***, next"),
        ("GET https://host/v1?a=1&key=x1&b=2", "GET https://host/v1?a=1&key=***&b=2"),
        ("https://host/o?X-Amz-Signature=01ab&sig=x%2By", "https://host/o?X-Amz-Signature=***&sig=***"),
        ("postgres://user:p@ss@host/db", "postgres://***@host/db"),
        (
            "Authorization: Basic x1\nx-api-key: x1\nSet-Cookie: s=1",
            "Authorization: Basic ***\nx-api-key: ***\nSet-Cookie: ***",
        ),
        ("curl -H 'Authorization: token x1'", "curl -H 'Authorization: token ***'"),
        ("api_key: x1", "api_key: ***"),
        (r"api_key = 'a\'b', next", "api_key = ***, next"),
        ("Cookie: a=x1; b=x1\nAccept: b", "Cookie: ***\nAccept: b"),
        ("{'Cookie': 'a=x1; b=x1'}, next", "{'Cookie': ***}, next"),
        ("[('X-Api-Key', 'x1'), ('Accept', 'b')]", "[('X-Api-Key', ***), ('Accept', 'b')]"),
        ("{b'x-api-key': b'x1'}", "{b'x-api-key': ***}"),
        (json.dumps(json.dumps({"api_key": "x1", "a": "b"})), r'"{\"api_key\": ***\", \"a\": \"b\"}"'),
        ("export MY_TOKEN=x1 OTHER_KEY=x1", "export MY_TOKEN=*** OTHER_KEY=***"),
        ("AccountName=a;AccountKey=x1;", "AccountName=a;AccountKey=***;"),
        ("Ocp-Apim-Subscription-Key: x1", "Ocp-Apim-Subscription-Key: ***"),
        (f"npm_{'a1' * 18} SG.{'a1' * 11}.{'a1' * 20} dop_v1_{'a1' * 32} pplx-{'a1' * 20}", "*** *** *** ***"),
        ("os.environ['MY_TOKEN'] = 'x1'", "os.environ['MY_TOKEN'] = ***"),
        ("api_keys: ['x1', 'x2'], next", "api_keys: ***, next"),
        ("Config(api_key=SecretStr('x1'), a=1)", "Config(api_key=***, a=1)"),
        ('"api_key": {"value": "x1"}, "a": 1', '"api_key": ***, "a": 1'),
        ("api_key => 'x1', api_key := x1, api_key%3Dx1", "api_key => ***, api_key := ***, api_key%3D***"),
        ("<password>x1</password>", "<password>***</password>"),
        ("Client(token='abcdefgh1', a=1)", "Client(token='***', a=1)"),
        ("Incorrect API key provided: abcdefgh1.", "Incorrect API key provided: ***."),
        ("authorization: bearer abcdefgh1", "authorization: bearer ***"),
        ('Authorization: Digest username="a", response="x1"', "Authorization: Digest ***"),
        ("api_key: |\n  x1\na: b", "api_key: |\n  ***\na: b"),
        ("https://hooks.slack.com/services/T1/B1/x1 ", "https://hooks.slack.com/services/*** "),
    ],
)
def test_what_tells_by_its_form_that_it_is_a_secret_is_masked(text: str, expected: str) -> None:
    assert masked(text) == expected


@pytest.mark.parametrize(
    "text",
    [
        "environment.judge.api_key_env: found X, which is not set; expected a variable of the environment",
        "environment.mine.api_key: found none; expected a text",
        "rollout.max_tokens = 5, eos_token = '</s>', token: 7",
        "a_" * 20_000,
        "cookie_" * 10_000,
        "-" * 20_000,
        "eyJabcdefgh-" * 2_000,
        "policy.hf_config_overrides.router_aux_loss_coef",
        "invalid token in line 3, token = 'password', the bearer certificates",
        "expected one of 'password', 'text'",
        "http://host/path@2",
        "loss per-token: 0.5, https://host/v1?page=2&top_k=4, api_keys_seen",
    ],
    ids=lambda text: text[:20],
)
def test_what_is_no_secret_stays(text: str) -> None:
    assert masked(text) == text


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        *(
            (name, True)
            for name in (
                "pwd",
                "cookie",
                "wandbApiKey",
                "api_keys",
                "ssh_key",
                "x-api-key",
                "headers.Authorization",
                "api_key",
                "x.api_key",
                "apiKey",
                "token",
                "hf_token",
                "password",
                "client_secret",
                "secretAccessKey",
                "openai_key",
                "bearer",
                "HF_TOKEN",
            )
        ),
        *(
            (name, True)
            for name in (
                "WANDB_API_KEY",
                "AWS_SECRET_ACCESS_KEY",
                "AWS_ACCESS_KEY_ID",
                "MY_TOKEN",
                "DB_PASSWORD",
                "PGPASSWORD",
                "SENTRY_DSN",
            )
        ),
        *(
            (name, False)
            for name in (
                "api_key_env",
                "eos_token",
                "bot_token",
                "PWD",
                "OLDPWD",
                "max_tokens",
                "key",
                "result_key",
                "PATH",
                "TOKENIZERS_PARALLELISM",
            )
        ),
    ],
)
def test_names_of_secrets(name: str, expected: bool) -> None:
    assert is_secret_name(name) == expected


def test_a_table_keeps_what_is_no_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOME_API_KEY", KEY)
    table: dict[str, Any] = {
        "mine": {
            "api_key": "x",
            "password": 12345678,
            "token": 7,
            "api_key_env": "X",
            "eos_token": "</s>",
            "number": 1,
            "none": None,
            "text": f"with {KEY}",
        },
        "environment": {"OPENAI_API_KEY": "k", "CUDA_VISIBLE_DEVICES": "0"},
        "command": ["--api-key", "q", "--api-key=q", "--model", "m"],
        "urls": ["http://u:p@host"],
    }
    assert masked_table(table) == {
        "mine": {
            "api_key": "***",
            "password": "***",
            "token": 7,
            "api_key_env": "X",
            "eos_token": "</s>",
            "number": 1,
            "none": None,
            "text": "with ***",
        },
        "environment": {"OPENAI_API_KEY": "***", "CUDA_VISIBLE_DEVICES": "0"},
        "command": ["--api-key", "***", "--api-key=***", "--model", "m"],
        "urls": ["http://***@host"],
    }
    places = ["mine.api_key", "mine.password", "environment.OPENAI_API_KEY", "command[1]", "command[2]", "urls[0]"]
    assert list(masked_keys(masked_table(table))) == places
    assert not list(masked_keys({"stop": ["***", "a***", "key=***"], "prompt": "***", "text": "**bold***"}))


def test_secrets_of_a_recipe_are_known_at_any_depth() -> None:
    keep_secrets(
        {"a": {"api_key": "first1", "list": [{"token": "second2"}]}, "api_keys": ["third3", 4444444], "password": "none"}
    )
    assert masked("first1 second2 third3 4444444 none") == "*** *** *** *** none"


@pytest.mark.parametrize("scheme", ["Bearer", "basic", "Token "])
def test_a_secret_is_masked_without_the_scheme_before_it(scheme: str, monkeypatch: pytest.MonkeyPatch) -> None:
    keep_secrets({"headers": {"Authorization": f"{scheme} kept-{scheme.strip()}-x1"}})
    monkeypatch.setattr(sys, "argv", ["rlcore", f"agent.headers.Authorization='{scheme} argued-{scheme.strip()}-x1'"])
    assert masked(f"unknown: kept-{scheme.strip()}-x1, argued-{scheme.strip()}-x1") == "unknown: ***, ***"


@pytest.mark.parametrize("source", ["environment", "command line", "recipe"])
def test_a_url_s_login_is_masked_without_its_url(source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    password = f"word/{source}"
    url = f"http://user:{quote(password, safe='')}@host/v1"
    if source == "environment":
        monkeypatch.setenv("SERVER_URL", url)
    elif source == "command line":
        monkeypatch.setattr(sys, "argv", ["rlcore", f"a.base_url={url}"])
    else:
        keep_secrets({"a": {"base_urls": ["http://host/v1", url]}})
    basic = base64.b64encode(f"user:{password}".encode()).decode()
    assert masked(f"found {password} and {basic} of user") == "found *** and *** of user"


def test_secrets_of_a_command_are_masked_and_known() -> None:
    command = ["env", "API_KEY=argued1", "agent", "--api-key", "argued2", "-H", "X-Api-Key: argued3", "--max-tokens=9", "a: b"]
    shown = ["env", "API_KEY=***", "agent", "--api-key", "***", "-H", "X-Api-Key: ***", "--max-tokens=9", "a: b"]
    assert masked_table({"command": command}) == {"command": shown}
    assert list(masked_keys({"command": shown})) == ["command[1]", "command[4]", "command[6]"]
    keep_secrets({"agent": {"command": command}})
    assert masked("argued1 argued2 argued3") == "*** *** ***"


def test_a_secret_that_was_cut_off_is_masked() -> None:
    keep_secret("cut0123456789off")
    assert masked("found cut012345678, and cut0123") == "found ***, and cut0123"


def test_others_programs_get_what_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("WANDB_API_KEY", "HF_TOKEN", "NAMED_KEY", "SOMETHING", "LC_ALL", "HF_HOME"):
        monkeypatch.setenv(name, "value")
    monkeypatch.setenv("HTTPS_PROXY", "http://u:p@proxy")
    monkeypatch.setenv("HTTP_PROXY", "http://proxy")
    found = child_environment(["NAMED_KEY", "NOT_SET"])
    assert {"NAMED_KEY", "LC_ALL", "HF_HOME", "PATH", "HTTP_PROXY"} <= found.keys()
    assert not {"WANDB_API_KEY", "HF_TOKEN", "SOMETHING", "HTTPS_PROXY", "NOT_SET"} & found.keys()
    (problem,) = unset_problems("environment.agent", ["NAMED_KEY", "NOT_SET"])
    assert str(problem).startswith("environment.agent.pass_environment: found NOT_SET, which is not set")
