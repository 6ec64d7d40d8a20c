"""Secrets in names, texts and command lines, which neither a log nor a file of a job may keep.

A name shows whether a value is a secret, and names of machine learning are similar. "api_key" and
"hub_token" are secrets; "key_dim", "max_tokens", "eos_token", "image_key", "tokenizer" and "monkey" are not.
Some values show it themselves, as ``"ghp_..."`` does. In doubt a value is masked.

A text may be a megabyte without a space, as an image in base64 is: every expression here takes a time that
grows with the text alone. So a name is looked for only where a word begins, and no part gives back what it
has taken (``++``).
"""

import re
from collections.abc import Callable, Sequence

__all__ = ["MASK", "is_secret", "mask_arguments", "mask_text"]

MASK = "***"
"""What stands in the place of a secret."""

# -- Names -----------------------------------------------------------------------------------------

# Anywhere in a name: "password_hash", "client_secret_id".
_PASSWORD = {"authorization", "cred", "credential", "passcode", "passkey", "passphrase", "passwd", "password"}
_PASSWORD |= {"pwd", "secret", "webhook"}
# As its last word, in the singular: "api_key", "hftoken", "sshkey"; neither "key_dim" nor "monkey".
_SECRET_LAST = re.compile(
    "(access|api|auth|encryption|master|private|secret|signing|ssh)?keys?|(api|access)tokens"
    "|[a-z]*(password|passwd|secret|token)|auth|cookies?|jwts?|otp|pat"
)
# As its only word, or after one of an account: "db_pass"; not "forward_pass".
_PASS = {"pass", "pw"}
_ACCOUNTS = {"admin", "db", "email", "ftp", "http", "https", "login", "mail", "mysql", "pg", "postgres"}
_ACCOUNTS |= {"proxy", "redis", "root", "smtp", "sql", "ssh", "sudo", "user", "vault"}
# Before a key or token they leave no doubt, whatever else is in the name: "image_api_keys".
_DOUBTLESS = {"access", "api", "auth", "private", "refresh"}
# Tokens of tokenizers; keys of dictionaries, tables and attention.
_PLAIN = {
    *("additional", "bos", "cls", "end", "eos", "extra", "image", "mask", "new", "pad", "prompt", "sep"),
    *("special", "start", "stop", "unk"),
    *("audio", "batch", "cache", "caption", "column", "data", "dict", "feature", "foreign", "group", "index"),
    *("input", "label", "loss", "metric", "output", "primary", "sort", "state", "target", "text", "video"),
}
_COUNTS = {"count", "max", "min", "n", "num", "total"}  # as a name's first word: "num_keys"
_SWITCHES = {"disable", "enable", "has", "is", "no", "require", "requires", "use", "with"}  # "use_auth"
_SIGNATURES = {"credential", "sig", "signature"}  # in the query of an address: "&sig=", "X-Amz-Signature="

_WORDS = re.compile(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])")


def is_secret(name: str, *, is_number: bool = False) -> bool:
    """Return whether a value of this name is a secret.

    Args:
        name: The name of an option, a variable or a field.
        is_number: Whether the value is a number: one called "token" is an id, one called "password" a PIN.
    """
    words = _words(name)
    if any(word.removesuffix("s") in _PASSWORD for word in words):
        return True
    if is_number or not words:
        return False
    *before, last = words
    if last in _PASS:
        return not before or before[-1] in _ACCOUNTS
    if last == "id" and before[-2:-1] and before[-1] == "key":  # "aws_access_key_id"
        return before[-2] in _DOUBTLESS
    follows_doubtless = bool(before) and before[-1] in _DOUBTLESS
    if not _SECRET_LAST.fullmatch(last):
        return follows_doubtless and last in {"tokens", "signature"}
    if follows_doubtless:
        return True
    return words[0] not in _COUNTS | _SWITCHES and not (before and before[-1] in _PLAIN)


def _words(name: str) -> list[str]:
    return [word.lower() for word in _WORDS.findall(name)]


# -- Texts -----------------------------------------------------------------------------------------

_ADDRESS = re.compile(r"""://((?:(?!://)[^\s"'<>`])*+)""")  # what follows "://", up to the next one
_HOST_END = re.compile(r"[/?#]")

# A name, and what stands between it and its value: "=", ": ", "=>", with quotes that may be escaped.
_ASSIGNED = re.compile(r"""(?<![\w.-])([\w.-]++)[\\"']*+\s*+(?:=>|:=|[=:](?!//))\s*+""")
_WORD = r"""[^\s,;&(){}\[\]"'\\]++"""
_SCHEME = r"(?:api-?key|basic|bearer|digest|negotiate|token)\s++"  # of a header
_VALUE = re.compile(
    rf"""(?:[bfru]{{0,2}}\\*+(?:"[^"]*+|'[^']*+)|\[[^\]]*+|\([^)]*+|\{{[^}}]*+|(?:{_SCHEME})?{_WORD})""",
    re.IGNORECASE,
)
_REST = re.compile(r"""\\*+["']?[^\r\n"']++""")  # of a line: a header has several words
_LEAD = re.compile(r"""[bfru]{0,2}\\*+["']""", re.IGNORECASE)
_NO_SECRETS = {"", "0", "1", "false", "no", "none", "null", "off", "on", "true", "yes"}

_HEADER = re.compile(r"\b(bearer|basic|token)(\s++)([\w.~+/-]++=*+)", re.IGNORECASE)

# Values that show what they are: of GitHub, GitLab, npm, PyPI, Docker, Slack, Google, Stripe, AWS, Hugging
# Face and OpenAI; a JSON web token.
_TELLING = re.compile(
    r"(?<![\w-])(?:"
    r"(?:gh[opsur]_|github_pat_|glpat-|npm_|pypi-|dckr_[po]at_|dop_v1_|shpat_|whsec_|xox[a-z]-|ya29\.|[prs]k_(?:live|test)_)"
    r"[\w.-]++"
    r"|(?:AKIA|ASIA|AIza|hf_|sk-)(?=[A-Za-z_-]*+[0-9])[\w-]{7,}+"
    r"|eyJ[\w-]*+\.[\w.-]++"
    r"|SG\.[\w-]{16,}+\.[\w-]++)"
)
_HOOKS = re.compile(r"(hooks\.slack\.com/\w++/|/api/webhooks/)[\w/-]++")
_NETRC = re.compile(r"(\blogin\s++\S++\s++password\s++)\S++")
_PRIVATE_KEY = re.compile(r"(-----BEGIN [A-Z ]{0,40}PRIVATE KEY-----)[^-]*+")


def mask_text(text: str) -> str:
    """Return a text with ``***`` for what is secret in it.

    That is: passwords of addresses, values of "token=...", headers, and values that show what they are.
    """
    text = _masked_matches(_ADDRESS, text, _password_of)
    text = _PRIVATE_KEY.sub(rf"\1{MASK}", text)
    text = _HOOKS.sub(rf"\1{MASK}", text)
    text = _NETRC.sub(rf"\1{MASK}", text)
    parts: list[str] = []
    at = 0
    for name in _ASSIGNED.finditer(text):
        if name.start() < at or not _names_secret(text, name):
            continue
        begin, end = _value_at(text, name)
        if text[begin:end].lower() not in _NO_SECRETS:
            parts += text[at:begin], MASK
            at = end
    text = "".join([*parts, text[at:]])
    text = _masked_matches(_HEADER, text, _value_of_header)
    return _TELLING.sub(MASK, text)


def _names_secret(text: str, name: re.Match[str]) -> bool:
    if is_secret(name[1]):
        return True
    words = _words(name[1])
    is_of_query = name.start() > 0 and text[name.start() - 1] in "?&"
    return is_of_query and bool(words) and words[-1] in _SIGNATURES


def _value_at(text: str, name: re.Match[str]) -> tuple[int, int]:
    """Return where the value begins and ends that follows a name; quotes and brackets are none of it."""
    begin = name.end()
    if {"authorization", "cookie"} & set(_words(name[1])):
        match = _REST.match(text, begin)
    else:
        match = _VALUE.match(text, begin)
    if match is None:
        return begin, begin
    lead = _LEAD.match(text, begin)
    if lead is not None:
        begin = lead.end()
    elif text[begin] in "[({":
        begin += 1
    end = match.end()
    while end > begin and text[end - 1] == "\\":  # of an escaped quote
        end -= 1
    return begin, max(begin, end)


def _masked_matches(
    pattern: re.Pattern[str], text: str, find: Callable[[re.Match[str]], tuple[int, int] | None]
) -> str:
    """Mask what ``find`` returns of each match: where in the text it begins and ends."""
    parts: list[str] = []
    at = 0
    for match in pattern.finditer(text):
        place = find(match)
        if place is not None:
            begin, end = place
            parts += text[at:begin], MASK
            at = end
    return "".join([*parts, text[at:]])


def _password_of(address: re.Match[str]) -> tuple[int, int] | None:
    """Return where the password of an address lies; of "https://token@host", the token."""
    rest, start = address[1], address.start(1)
    is_web = address.string[max(0, start - 8) : start - 3].lower().endswith(("http", "https"))
    host_end = _HOST_END.search(rest)
    until = len(rest) if host_end is None else host_end.start()
    colon, sign = rest.find(":", 0, until), rest.rfind("@", 0, until)
    if sign < 0:
        # A password may have a "/" in it. What follows a ":" in an address of the web is a port.
        is_port = is_web and rest[colon + 1 : until].isdigit()
        if colon < 0 or is_port or rest.startswith("["):
            return None
        sign = rest.rfind("@")
    elif not 0 <= colon < sign:
        # A name before a password stays; one alone may be the secret itself.
        if is_web and sign:
            return (start, start + sign)
        return None
    elif not is_web:
        sign = rest.rfind("@")
    if sign > colon + 1:
        return (start + colon + 1, start + sign)
    return None


def _value_of_header(header: re.Match[str]) -> tuple[int, int] | None:
    """Return where the value of "Bearer x" lies, unless it is a word: "basic training"."""
    value = header[3]
    is_word = value.isalpha() and (value.islower() or value.istitle()) and len(value) < 20
    if is_word:
        return None
    return header.span(3)


# -- Command lines ---------------------------------------------------------------------------------

_NAME = re.compile(r"[\w.-]+")


def mask_arguments(arguments: Sequence[str]) -> list[str]:
    """Return the words of a command, with the values of ``--token x``, ``--token=x``, ``TOKEN=x`` masked."""
    masked: list[str] = []
    to_mask = 0  # how many of the next words are values of a secret
    for word in arguments:
        if to_mask and not word.startswith("--"):
            masked.append(_masked(word))
            to_mask -= 1
            continue
        to_mask = 0
        name, equals, value = word.partition("=")
        is_option = word.startswith("-")
        is_name = (is_option or equals) and _NAME.fullmatch(name)
        if not is_name or not is_secret(name.rpartition(".")[2]):
            masked.append(mask_text(word))
        elif equals:
            masked.append(f"{name}={_masked(value)}")
        else:
            masked.append(word)
            # "--api-keys" takes several
            if name.endswith("s"):
                to_mask = len(arguments)
            else:
                to_mask = 1
    return masked


def _masked(value: str) -> str:
    if value.lower() in _NO_SECRETS:
        return value
    return MASK
