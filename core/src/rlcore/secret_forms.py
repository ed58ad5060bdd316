"""Forms by which secrets are recognised in text: names, headers, addresses, keys of providers, and commands."""

import re

_TOKENS = "access|api|auth|bearer|gh|github|gitlab|hf|hub|id|refresh|sas|secret|security|session"
SECRET = (
    r"api[_-]?keys?|access[_-]?keys?(?:[_-]?id)?|secrets?(?:[_-]?keys?)?|(?:private|signing|encryption|license|ssh)[_-]?key"
    r"|(?:account|anthropic|auth|azure|consumer|gemini|hf|judge|master|open[_-]?ai|shared|subscription)[_-]?key"
    r"|shared[_-]?access[_-]?signature"
    r"|passwords?|passwd|passphrase|passcode|credentials?|connection[_-]?string|webhook[_-]?url"
    rf"|(?:proxy[_-]?)?authorization|x[_-]auth|cookies?|(?:{_TOKENS})[_-]?token"
)
LOGIN = re.compile(r"(?<=://)[^/\s'\"]+(?=@)|(?i:(?<=%3A%2F%2F))[^/\s&'\"]+?(?=%40)")
"""The user and password of an address."""
FORMATS = re.compile(
    r"\b(?:sk-[\w-]{16,}|[rs]k_(?:live|test)_\w{10,}|hf_[A-Za-z0-9]{16,}|gh[pousr]_\w{16,}|github_pat_\w{16,}|glpat-[\w-]{16,}"
    r"|gsk_[A-Za-z0-9]{16,}|xai-\w{16,}|nvapi-[\w-]{16,}|pypi-[\w-]{32,}|r8_[A-Za-z0-9]{16,}|AIza[\w-]{30,}|ya29\.[\w-]{16,}"
    r"|npm_[A-Za-z0-9]{30,}|SG\.[\w-]{16,}\.[\w-]{16,}|dop_v1_\w{32,}|pplx-\w{32,}|tgp_v1_[\w-]{16,}|fw_[A-Za-z0-9]{20,}|whsec_[\w+/=]{16,}"
    r"|AGE-SECRET-KEY-1[0-9A-Z]{20,}|A[KS]IA[0-9A-Z]{16}|xox[abeprs]-[\w-]{10,}|\d{8,10}:[\w-]{35})"
    r"|(?<=bot)\d{8,10}:[\w-]{35}|(?<![\w-])eyJ[\w-]{8,}\.(?:[\w-]{8,})?\.[\w-]*(?:\.[\w-]*){0,2}"
    r"|(?<=Digest )\w{1,20}=[^\r\n]+|(?<=AWS4-HMAC-SHA256 )Credential=[^\r\n'\"]+"
    r"|(?<=hooks\.slack\.com/services/)[\w/]+|(?<=/api/webhooks/)[\w/-]+"
    r"|(?s:-----BEGIN(?: |%20|\+)[A-Z %+20]*PRIVATE(?: |%20|\+)KEY(?:(?: |%20|\+)BLOCK)?-----.*?(?:-----END[A-Z -]*|\Z))"
)
"""Keys that have the known form of a provider, such as `sk-…`, of a header, or of a PEM block."""
_GAP = r"['\"]?,?\s+['\"]?"
"""The separator of a command's words, in a shell's form or in a list."""
_PROSE = "is|was|are|has|can|in|on|to|as|for|of|and|or|with|without|the|a|an|option|flag|asks|prompts|takes|needs|where|which"
"""Words that follow an option's name in a sentence."""
_QUERY = re.compile(
    r"(?i)((?:[?&#]|&amp;|%3F|%26)(?:[\w.-]{0,80}(?:key|token|secret|signature|password|auth|credential)|sig|pwd|code)(?:=|%3D))"
    r"[^&\s'\"#)>\]]+"
)
"""Secrets in the query of an address, such as `?key=VALUE`."""
_VALUE = (
    r"(?:[bfru]{0,2}(?:'''.*?'''|\"\"\".*?\"\"\"|'(?:[^'\\]|\\.)*'|\"(?:[^\"\\]|\\.)*\")|\\+['\"][^'\"\\]*"
    r"|\w{0,40}\([^()]{0,400}\)|\[[^\[\]]{0,400}\]|\{[^{}]{0,400}\}|[^\s'\",;&}\]<]+)"
)
"""A value behind a name: a quoted text, a call, a list, a table or a word."""
_ASSIGNED = re.compile(
    rf"(?i)((?<![\w-])--?[\w-]{{0,80}}?(?:{SECRET}|(?<=-)token)(?:=|{_GAP})|\(b?['\"][\w.-]{{0,80}}?(?:{SECRET})['\"],\s*"
    r"|(?<![\w.-])(?-i:[A-Z][A-Z0-9_]{0,80}_(?:KEY|TOKEN|SECRET|PASS|PAT|PWD|AUTH|DSN|WEBHOOK)(?:['\"]\]\s?)?=\s?)"
    r"|(?<![\w.-])(?-i:SSHPASS|PASS)=\s?"
    rf"|(?<![\w.-])[\w.-]{{0,80}}?(?:{SECRET})(?:>|%3D|\\*['\"]?\]?\s*(?:=>|:=|[:=])\s*)"
    r"(?:(?:basic|bearer|digest|token|apikey)\s+|[|>][+-]?\s*\n\s*)?)"
    r"(?!(?:found|expected|not|invalid|missing|required|unknown|wrong|expired|denied)(?:[\s.,;]|\Z)"
    r"|(?:basic|bearer|digest|token|apikey)\s)" + _VALUE
)
"""Assignments to a secret's name: "--api-key VALUE", "api_key=VALUE", '"api_key": "VALUE"', "x-api-key: VALUE",
"('X-Api-Key', 'VALUE')", "MY_TOKEN=VALUE"."""
_SAID = re.compile(
    r"(?i)((?<![\w.-])(?:(?:token|pwd|jwt|otp)['\"]?\s?[:=]\s?|pass['\"]?\s?=\s?"
    rf"|(?:[\w-]{{0,80}}?(?:{SECRET})(?<!s)(?<!authorization)|api key|token)"
    r"(?: provided| for [\w@.' -]{1,40}:)?(?: is| was)?\s?[:=]?\s)['\"]?)"
    r"(?=[^\s\d'\"<>(),;]*\d)(?=[^\sa-z'\"<>(),;]*[a-z])[\w+=!@#$%^&*?~-][\w+/=!@#$%^&*?~-]{7,}(?!\w|\.\w)"
)
"""Values with letters and digits behind words that name other things too: "token=VALUE", "invalid API key 'VALUE'"."""
_IS = re.compile(
    r"(?i)(\blogin\s\S{1,80}\s+password\s+|\bpass(?:word|phrase|code|wd) (?:is|was)(?:\s?:\s?['\"]?|\s?['\"]))[^\s'\"]+"
)
"""Passwords in a sentence, "the password is: VALUE", and in .netrc."""
_BEARER = re.compile(r"(?i)((?:(?<!\w)|(?<=%20))bearer(?:[ +]|%20|:\s?))(?=[a-z.~+/=-]*\d)[\w.~+/=-]{8,}")
"""Tokens of a header without the header's name."""
_BASIC = re.compile(r"(\bBasic )(?=[^\s\d]*\d)(?=[^\sa-z]*[a-z])(?=[^\sA-Z]*[A-Z])[A-Za-z0-9+/]{16,}={0,2}(?![\w.])")
"""Logins of a header without the header's name."""
_PAIR = re.compile(
    rf"(?i)((?:name|key|type)['\"]?\s?[:=]\s?['\"]?[\w.-]{{0,80}}?(?:{SECRET}|token)['\"]?(?:,?\s+['\"]?value['\"]?\s?[:=]\s?|>))"
    + _VALUE
)
"""Values whose name is a value, too: {"name": "DB_PASSWORD", "value": "VALUE"}."""
_LOGINS = re.compile(r"(\b(?:auth=|\w{0,40}Auth)\(['\"][^'\"\n]{0,80}['\"], ?)(?:'[^'\n]*'|\"[^\"\n]*\")")
"""Passwords of HTTP clients: auth=("user", "VALUE")."""
_COOKIES = re.compile(r"(?i)(?<![\w.-])((?:set-)?cookie['\"]?\s*[:=]\s*b?['\"]?)(?=[^\s=]{1,200}=)[^'\"\r\n]+")
"""All cookies of a header."""
_PIPED = re.compile(r"(\b(?:echo|printf) (?:-\w+ )*)[^\n|]{1,200}(?=\|[^\n|]{0,80}(?:-stdin|\bchpasswd|\bsudo -S))")
"""Texts that a shell hands to a program that asks for a password."""
_ANY = rf"(?!(?:{_PROSE})\b)[^\s'\",][^\s'\"]*"
_MIXED = r"(?:\*{3}|(?=[^\s'\"]*\d)(?=[^\s'\"]*[A-Za-z])[^\s'\"]+)"
_PROGRAMS = (
    ("curl", r"(?:-[uU]|--(?:proxy-)?user)", r"[^\s'\":]+:", _ANY),
    ("curl", r"--oauth2-bearer|-b|--cookie", "", _ANY),
    (r"https?|xh", "-a|--auth", r"[^\s'\":]+:", _ANY),
    (r"mysql\w*|mariadb[\w-]*", "-p", "", rf"(?:(?<=-p)|(?<=-p['\"])){_ANY}|{_MIXED}"),
    (rf"sshpass|mongo\w*|7z\w?|(?:docker|podman|az|oc){_GAP}login", "-p", "", _ANY),
    (r"(?:redis|valkey|keydb)-cli", "-a|--pass", "", _ANY),
    (r"ldap\w+", "-w", "", _ANY),
    ("sqlcmd|bcp|zip|unzip", "-P", "", _ANY),
    ("smbclient|lftp", "-[uU]", r"[^\s'\",%]+[,%]", _ANY),
    ("openssl", "-pass(?:in|out)?", "pass:", _ANY),
)
"""Programs with the option whose value is a secret, what comes before the secret in the value, and the secret's form."""
_LOGIN = re.compile(
    rf"(\blogin(?:{_GAP}--?\w[^\s'\"]{{0,80}}){{0,5}}{_GAP})(?:\*{{3}}|(?=[\w.-]*\d)(?=[\w.-]*[A-Za-z])[\w.-]{{20,}})"
)
"""Keys that a program's `login` takes: "tracker login VALUE"."""
COMMANDS = (
    _LOGIN,
    *(
        re.compile(
            rf"((?<![\w.-])(?:{program})(?=['\"]?,?\s)(?:(?!\*\*\*)[^\n|;&]|(?<=\S)[|;&](?=\S)){{0,200}}?(?<=[\s'\"])(?:{options})"
            rf"(?:{_GAP}|=['\"]?|(?<![a-z]{{3}})['\"]?){user})(?:{secret})"
        )
        for program, options, user, secret in _PROGRAMS
    ),
)
"""Secrets on command lines of other programs, in a shell's form or as a list: "mysql -pVALUE", ['curl', '-u', 'me:VALUE']."""
ALWAYS = (_QUERY, *COMMANDS)
"""Patterns of secrets that are masked also in values of a recipe. The first group stays."""
IN_MESSAGES = (_SAID, _IS, _BEARER, _BASIC, _PAIR, _LOGINS, _PIPED, _COOKIES, _ASSIGNED)
"""Patterns of secrets that are masked in messages. The first group stays."""
