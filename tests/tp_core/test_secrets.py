"""Secrets in texts and command lines: what is masked, what stays, and that a long text takes no longer."""

import pytest
from tp_core.secrets import is_secret, mask_arguments, mask_text

from tests.cases import first_fast

LONG = 1_000_000

# Each has "hunter2" in it, which is the secret.
SECRETS = [
    # By the name of an option or a variable
    ["--token=hunter2"],
    ["--api-key", "hunter2"],
    ["--api-keys", "a", "hunter2"],
    ["--db.password", "hunter2"],
    ["--secretKey=hunter2"],
    ["--apikey=hunter2"],
    ["--passphrase", "hunter2"],
    ["--credential=hunter2"],
    ["HF_TOKEN=hunter2"],
    ["MYSQL_PWD=hunter2"],
    ["--pass", "hunter2"],
    ["--pw", "hunter2"],
    ["--mail-pw=hunter2"],
    ["--db_pass", "hunter2"],
    ["--creds", "hunter2"],
    ["--auth", "hunter2"],
    ["--cookie", "hunter2"],
    ["--jwt", "hunter2"],
    ["--otp", "hunter2"],
    ["--webhook", "hunter2"],
    ["--webhook-url=https://h/hunter2"],
    ["--aws_access_key_id=hunter2"],
    ["--clientsecret", "hunter2"],
    ["--mysecret=hunter2"],
    ["--ssh.passcode=hunter2"],
    ["--access-token", "hunter2"],
    ["--encryptionkey=hunter2"],
    ["--signing-key", "hunter2"],
    # Within a text
    ["--set=hf_token=hunter2,lr=1"],
    ['--json={"token": "hunter2", "lr": 1}'],
    ['{\\"token\\": \\"hunter2\\"}'],
    ["token => hunter2"],
    ["password: hunter2"],
    ["refresh_token: 'hunter2'"],
    ["{'api_key': b'hunter2'}"],
    ["api_keys=['a', 'hunter2']"],
    ["export GH_TOKEN=hunter2; run"],
    ["--connect=host=x password='hunter2 hunter2' port=1"],
    ["DefaultEndpointsProtocol=https;AccountName=a;AccountKey=hunter2=="],
    ["Endpoint=sb://x/;SharedAccessKeyName=n;SharedAccessKey=hunter2"],
    ["-----BEGIN RSA PRIVATE KEY-----\nhunter2\n-----END RSA PRIVATE KEY-----"],
    ["jdbc:postgresql://h/db?user=u&password=hunter2"],
    ["Server=h;User Id=u;Password=hunter2;"],
    ["docker run -e WANDB_API_KEY=hunter2 image"],
    ["//registry.example/:_authToken=hunter2"],
    ["machine h login u password hunter2"],
    # In a header
    ["Set-Cookie: session=hunter2; Path=/"],
    ["--header", "Authorization: Token hunter2"],
    ["--header=Authorization: Bearer hunter2"],
    ["-H", "X-Api-Key: hunter2"],
    ["-H", "Cookie: a=1; session=hunter2"],
    ["Proxy-Authorization: Digest username=u, response=hunter2"],
    ["Authorization: AWS4-HMAC-SHA256 Credential=hunter2/x, Signature=hunter2"],
    ["curl -H 'Authorization: hunter2'"],
    ["Bearer hunter2"],
    ["Basic dTpodW50ZXIyhunter2=="],
    # In an address
    ["postgres://user:hunter2@host/db"],
    ["postgres://u:hun/hunter2@h/x"],
    ["mongodb+srv://u:p@hunter2@h/x"],
    ["redis://:hunter2@h:6379/0"],
    ["amqp://u:hunter2#x@h"],
    ["https://hunter2@github.com/x"],
    ["https://u:a/hunter2@h/x"],
    ["https://x/y?access_token=hunter2&page=2"],
    ["https://h/x?X-Amz-Signature=hunter2"],
    ["https://acc/x?sv=1&sig=hunter2%3D"],
    ["https://s/x?AWSAccessKeyId=hunter2&Expires=1&Signature=hunter2"],
    ["https://g/x?X-Goog-Signature=hunter2&X-Goog-Credential=hunter2"],
    ["https://hooks.slack.com/services/T/B/hunter2"],
    ["https://discord.com/api/webhooks/1/hunter2"],
    # By what the value is
    ["--hub", "hf_hunter2"],
    ["--as", "ghp_hunter2"],
    ["--as", "github_pat_hunter2"],
    ["--as", "glpat-hunter2"],
    ["--as", "npm_hunter2"],
    ["--as", "pypi-hunter2"],
    ["--as", "dckr_pat_hunter2"],
    ["--as", "xoxb-1-hunter2"],
    ["--as", "sk-hunter2"],
    ["--as", "sk_live_hunter2"],
    ["--as", "AKIAhunter2"],
    ["--as", "eyJ.hunter2"],
]

PLAIN = [
    *("--max_tokens=5", "--tokenizer", "bpe", "--key_dim=64", "--pad_token=<pad>", "--lr=0.1", "monkey=1"),
    *("--num_keys=3", "--image_key=jpg", "--keyboard=us", "--hotkey=x", "--sort_key=x", "label_key=y"),
    *("tokens_per_batch=5", "token_type_ids=3", "query_key_value", "secretary=bob", "{'key_dim': 3}"),
    *("--forward_pass=2", "passes=3", "--bypass=1", "two_pass=on", "compass=3", "path/to/pass.py"),
    *("--use_auth=true", "--auth=none", "password=none", "--author=me", "--encoder=x", "cookiecutter=x"),
    *("--patience=3", "--patch=2", "signature=sha256", "--sig=0.5", "a==b", "12:30:00", "--pattern=a:b"),
    *("--url=http://host:80/x", "git@github.com:x/y.git", "ssh://git@host/x", "http://[::1]:80/x@y"),
    *("http://host:8080/@user/x", "https://unpkg.com/react@18/x", "https://medium.com/@user/post"),
    *("gs://bucket/a@b", "C:\\Users\\x", "hf_hub_download", "hf_model", "sk-learn", "AKIA", "eyJ"),
    *("Basic training", "a bearer of news", "token ring", "def f(x: int) -> str: pass", "x: List[str] = []"),
]


@pytest.mark.parametrize("words", SECRETS, ids=" ".join)
def test_a_secret_is_masked(words):
    shown = " ".join(mask_arguments(words))
    assert "hunter2" not in shown
    assert "***" in shown


@pytest.mark.parametrize("text", PLAIN)
def test_what_is_no_secret_stays(text):
    assert mask_arguments(["--of", text]) == ["--of", text]
    assert mask_text(text) == text


def test_what_stands_beside_a_secret_stays():
    assert mask_text("lr=1 token=x, host=y") == "lr=1 token=***, host=y"
    assert mask_text('{"token": "x", "lr": 1}') == '{"token": "***", "lr": 1}'
    assert mask_text("postgres://me:a/b@host:1/db?x=1") == "postgres://me:***@host:1/db?x=1"
    assert mask_text("https://a@h/x?access_token=b&page=2") == "https://***@h/x?access_token=***&page=2"
    assert mask_text("https://h/x?sv=1&sig=a%3D&se=2") == "https://h/x?sv=1&sig=***&se=2"


# A quadratic expression takes hours for a megabyte, a linear one a fraction of a second: these tests end, or
# are ended by their time limit.

REPEATED = ["a", "-", ".", " ", "=", ":", "a=", "-.a", "://", "x://a:", "x://a:b@", "x://a:/@", '"', "\\"]
REPEATED += [
    "token=",
    "token='",
    "api_key=[",
    "Bearer ",
    "hf_",
    "sk-",
    "eyJ",
    "SG.",
    "@",
    "_",
    "1",
    "Aa",
    "?sig=",
]


@pytest.mark.parametrize("part", first_fast(REPEATED, 5))
def test_a_long_text_is_masked_in_a_time_that_grows_with_it_alone(part):
    text = part * (LONG // len(part))
    mask_text(text)
    is_secret(text)


@pytest.mark.parametrize("part", first_fast("a-.1"))
def test_a_long_argument_is_masked_in_a_time_that_grows_with_it_alone(part):
    text = part * LONG
    mask_arguments([text, f"-{text}!", f"--{text}=1", f"--{text}!=1"])
