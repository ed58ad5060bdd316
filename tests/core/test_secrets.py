"""Secrets are masked in every form of text, and child processes get only those that are named."""

import base64
import html
import json
import re
import sys
import time
from collections.abc import Callable
from typing import Any
from urllib.parse import quote, quote_plus

import pytest

from rlcore import secrets
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

KEY = 'vq81/zx9q+"kw7p"'


@pytest.fixture(autouse=True)
def known(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hide the command line of the test run and what other tests have kept: `masked` knows their secrets."""
    monkeypatch.setattr(sys, "argv", ["rlcore"])
    monkeypatch.setattr(secrets, "kept_secrets", set())


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


KEYS = {
    "signs": "Ab12Cd34+Ef/56Gh=='\"<&>",
    "words": "my pass word+1\ttab",
    "letters": "schlüssel-日本-\U0001f511-\\n",
    "plain": "abcdefgh12345678",
}
SPELLINGS: dict[str, Callable[[str], str]] = {
    "itself": str,
    "percent": lambda key: quote(key, safe=""),
    "percent in small letters": lambda key: re.sub("%..", lambda found: found[0].lower(), quote(key, safe="")),
    "percent twice": lambda key: quote(quote(key, safe=""), safe=""),
    "percent but for some": lambda key: quote(key, safe="!~*'()"),
    "a form": quote_plus,
    "JSON": json.dumps,
    "JSON of letters": lambda key: json.dumps(key, ensure_ascii=False),
    "JSON twice": lambda key: json.dumps(json.dumps(key)),
    "JSON with \\/": lambda key: json.dumps(key).replace("/", "\\/"),
    "HTML": html.escape,
    "HTML by numbers": lambda key: key.replace("&", "&#38;").replace("<", "&#x3C;"),
    "Python": repr,
    "bytes": lambda key: repr(key.encode()),
    "escapes": lambda key: key.encode("unicode_escape").decode(),
    "ASCII": ascii,
    "hexadecimal": lambda key: key.encode().hex(),
    "HEXADECIMAL": lambda key: key.encode().hex().upper(),
    **{
        f"base64 behind {before!r}": lambda key, before=before: base64.b64encode(f"{before}{key}".encode()).decode()  # type: ignore[misc]
        for before in ("", ":", "u:", "me:")
    },
    "base64 within": lambda key: base64.b64encode(f"u:{key} and more".encode()).decode(),
    "base64 of addresses": lambda key: base64.urlsafe_b64encode(key.encode()).decode(),
    **{
        f"base64 of {kind}": lambda key, write=write: write(base64.encodebytes(f"{'user:' * 11}{key}".encode()).decode())  # type: ignore[misc]
        for kind, write in (
            ("76 columns", str),
            ("76 columns in a table", lambda text: text.replace("\n", "\r\n\t  ")),
            ("76 columns in JSON", json.dumps),
            ("76 columns in JSON twice", lambda text: json.dumps(json.dumps(text))),
            ("76 columns with percent", lambda text: quote(text, safe="")),
            ("lines of 10", lambda text: "\n".join(re.findall(".{1,10}", text))),
        )
    },
    "hexadecimal in lines": lambda key: "\n".join(re.findall(".{1,7}", key.encode().hex())),
    "base64 with percent": lambda key: quote(base64.b64encode(key.encode()).decode(), safe=""),
}


@pytest.mark.parametrize("spelling", SPELLINGS)
@pytest.mark.parametrize("key", KEYS.values(), ids=KEYS)
def test_no_spelling_of_a_known_secret_shows_a_part_of_it(key: str, spelling: str) -> None:
    written = SPELLINGS[spelling](key)
    assert masked(written) == written or spelling.startswith("JSON"), "no other rule masks it"
    keep_secret(key)
    shown = masked(f"endpoint said {written} of it")
    left = re.sub("^endpoint said |of it$", "", shown).replace("***", "")
    assert "***" in shown
    assert len(left) <= (20 if spelling == "base64 within" else 12 if "76" in spelling else 7), (
        "quotes, and what stood around it"
    )


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
        ("password is: wordy, my passphrase was 'wordy'", "password is: *** my passphrase was '***'"),
        ("Your API key is abcdefgh1", "Your API key is ***"),
        ("Password for user me: abcdefgh1!", "Password for user me: ***"),
        ("machine host login me password wordy", "machine host login me password ***"),
        ("aws configure set aws_secret_access_key abcdefgh1", "aws configure set aws_secret_access_key ***"),
        ("MYSQL_PWD=x1 SSHPASS=x1 mysql -h host", "MYSQL_PWD=*** SSHPASS=*** mysql -h host"),
        ("tool -password x1, ['wget', '--password', 'x1']", "tool -password ***, ['wget', '--password', '***']"),
        ("Authorization%3A%20Bearer%20abcdefgh1 BEARER abcdefgh1", "Authorization%3A%20Bearer%20*** BEARER ***"),
        ("u=https%3A%2F%2Fme%3Ax1%40host%2F%3Ftoken%3Dx1", "u=https%3A%2F%2F***%40host%2F%3Ftoken%3D***"),
        ('{"name": "DB_PASSWORD", "value": "x1"}', '{"name": "DB_PASSWORD", "value": ***}'),
        ("- name: DB_PASSWORD\n  value: x1", "- name: DB_PASSWORD\n  value: ***"),
        ("Session(auth=('me', 'x1'), timeout=3)", "Session(auth=('me', ***), timeout=3)"),
        ("echo x1 | docker login --password-stdin", "echo ***| docker login --password-stdin"),
        ("-----BEGIN PGP PRIVATE KEY BLOCK-----\n\nx1\n-----END PGP PRIVATE KEY BLOCK-----", "***"),
        ('"-----BEGIN%20PRIVATE%20KEY-----x1-----END', '"***'),
        ("eyJabcdefghi..abcdefgh.x1.abcdefgh, eyJabcdefghi.abcdefgh.x1", "***, ***"),
        ("https://api.telegram.org/bot12345678:" + "a" * 35 + "/get", "https://api.telegram.org/bot***/get"),
        ("X-Auth: x1\njwt=abcdefgh1, otp: abcdefgh1", "X-Auth: ***\njwt=***, otp: ***"),
        ("Basic bWU6dmVyeS1zZWNyZXQx, next", "Basic ***, next"),
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
        "curl " * 2_000 + "echo " * 2_000 + "mysql " * 2_000 + "api key " * 2_000,
        "The password is wrong, and the password was not required",
        "invalid password or user name; it must have 8 characters",
        "The API key is missing; set OPENAI_API_KEY",
        "token is expired, unexpected token '<' at position 12345678",
        "max_token 128000, pad_token token_12, special_token reserved_special_token_100",
        "Bearer authentication is required: WWW-Authenticate: Bearer realm",
        "Basic authentication failed; cookies are disabled",
        "ssh-key: not found. password: required",
        "mysql -p prompts for the password; mysql -u root -p db",
        "mysql with the -p option, mysql -P 3306 -h host",
        "redis-cli -a is insecure, and docker login -p needs care",
        "docker run -p 8080:80 nginx && ssh -p 2222 user@host",
        "curl -u is short for --user; curl -X POST http://host/path",
        "zip -r a.zip folder, 7z x a.7z, openssl x509 -in a.pem",
        "run wandb login first, or vault login with LDAP",
        "https://host/docs#token-limits?code_style=x",
        'auth=(\'me\', None), {"name": "max_tokens", "value": 5}',
        "pass@1: 0.5, pass = 12345678, PASS tests/test_a1.py",
        "--token-limit 5000 --tokenizer model-12345678 -password-file x",
        "-----BEGIN CERTIFICATE-----",
        "access token expired at 2026-11-28T13:00:00",
        "token 'Ġhello' has the id 15339; id_token_type: x",
        "echo hello | grep h",
        "credentials: found none; expected a file",
        "commit 0a1b2c3d4e5f60718293a4b5c6d7e8f901234567",
        "authorization x86_64-linux, the passwords file1234",
        "secret sharing, and the secret of success",
        "tokens per second: 1234.5, api keys: 3 configured",
        "mailto:me@example.com, user@host:/path",
        "Basic Qwen2Model and Basic training of 16 layers",
        'name = "password", type = "str"',
        "KeyError: 'password'",
    ],
    ids=lambda text: text[:20],
)
def test_what_is_no_secret_stays(text: str) -> None:
    assert masked(text) == text


@pytest.mark.parametrize(
    "text",
    [
        *(
            f"{name}{sign}Zq7xV2mK9p"
            for name in ("key", "my key", "signature", "author", "auth", "pin")
            for sign in (" = ", ": ")
        ),
        *(
            "my key is Zq7xV2mK9p",
            "pass: Zq7xV2mK9p",
            "login: me / Zq7xV2mK9p",
            "user me with Zq7xV2mK9p",
            "sign in with Zq7xV2mK9p",
        ),
        *(
            "--from-literal=key=Zq7xV2mK9p",
            "tool login Zq7xV2mK9p",
            "tool -p Zq7xV2mK9p",
            "tool -k Zq7xV2mK9p",
            "-a me:Zq7xV2mK9p",
        ),
        *("salt=Zq7xV2mK9p", "seed: Zq7xV2mK9p", "code=Zq7xV2mK9p", "id=Zq7xV2mK9p", "hash: Zq7xV2mK9p", "nonce=Zq7xV2mK9p"),
        *("session=Zq7xV2mK9p", "state=Zq7xV2mK9p", "digest: Zq7xV2mK9p"),
    ],
)
def test_values_that_only_their_meaning_makes_secret_stay_unless_they_are_known(text: str) -> None:
    """Rows, metrics and models have such names and values, which messages have to show."""
    assert masked(text) == text


def test_a_known_value_is_masked_behind_any_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOME_API_KEY", "Zq7xV2mK9p")
    assert masked("my key is Zq7xV2mK9p, id=Zq7xV2mK9p") == "my key is ***, id=***"


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
    keep_secrets({"agent": {"command": command}, "other": {"command": ["sh", "-c", "curl -u me:argued4 host"]}})
    assert masked("argued1 argued2 argued3 argued4") == "*** *** *** ***"


@pytest.mark.parametrize(
    ("command", "shown"),
    [
        (["curl", "-s", "-u", "me:x1", "host"], ["curl", "-s", "-u", "me:***", "host"]),
        (["curl", "--proxy-user=me:x1", "-U", "me:wordy"], ["curl", "--proxy-user=me:***", "-U", "me:wordy"]),
        (["/usr/bin/mysqldump", "-u", "me", "-px1", "db"], ["/usr/bin/mysqldump", "-u", "me", "-p***", "db"]),
        (["mysql", "-p", "x1", "db"], ["mysql", "-p", "***", "db"]),
        (["redis-cli", "-p", "6379", "-a", "x1"], ["redis-cli", "-p", "6379", "-a", "***"]),
        (["sshpass", "-p", "x1", "ssh", "-p", "22"], ["sshpass", "-p", "***", "ssh", "-p", "22"]),
        (["docker", "login", "-u", "me", "-p", "wordy"], ["docker", "login", "-u", "me", "-p", "***"]),
        (["mongosh", "-u", "me", "-p", "x1"], ["mongosh", "-u", "me", "-p", "***"]),
        (["ldapsearch", "-D", "cn=a", "-w", "x1"], ["ldapsearch", "-D", "cn=a", "-w", "***"]),
        (["zip", "-P", "x1", "a.zip"], ["zip", "-P", "***", "a.zip"]),
        (["smbclient", "-U", "me%x1"], ["smbclient", "-U", "me%***"]),
        (["openssl", "rsa", "-passin", "pass:x1"], ["openssl", "rsa", "-passin", "pass:***"]),
        (["wandb", "login", "--relogin", "4f1c0a9be27d4c6f8a135e7d9b20c4e6a7f81d35"], ["wandb", "login", "--relogin", "***"]),
        (["sh", "-c", "curl -u me:x1 host"], ["sh", "-c", "curl -u me:*** host"]),
    ],
    ids=" ".join,
)
def test_secrets_of_other_programs_are_masked(command: list[str], shown: list[str]) -> None:
    """In a text, in a list's form, and in a recipe, which says where a secret is missing."""
    assert masked(" ".join(command)) == " ".join(shown)
    assert masked(repr(command)) == repr(shown)
    assert masked(json.dumps(command)) == json.dumps(shown)
    assert masked_table({"command": command}) == {"command": shown}
    assert list(masked_keys({"command": shown}))


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


@pytest.mark.parametrize("text", ["cannot reach the login node07 of the cluster", "the login page2", "must login 2nd time"])
def test_sentences_of_logins_stay(text: str) -> None:
    assert masked(text) == text


@pytest.mark.parametrize(
    "text",
    ["A\n" * 50_000, "A" * 100_000, "A\\" * 50_000, "%25" * 30_000, "A%0A" * 30_000, "\n" * 100_000, "A\\\\\\n" * 20_000],
)
def test_lines_take_time_in_proportion_to_a_text(text: str) -> None:
    keep_secret("abcdefgh12345678")
    began = time.thread_time()
    masked(text)
    assert time.thread_time() - began < 2.0
