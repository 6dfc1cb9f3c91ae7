"""A protected product: TLS on both ports and API keys, as an operator sets them up with the command line."""

from __future__ import annotations

import ssl
from pathlib import Path

import httpx2
import openai
import pytest
import trustme

from tests.cli.run_blink import assert_one_line_failure, blink, shown_key
from tests.e2e.conftest import Launch
from tests.e2e.product import LIMIT


def test_the_command_and_openais_client_reach_a_protected_product(launch: Launch, tmp_path: Path) -> None:
    authority = trustme.CA()
    issued = authority.issue_cert("127.0.0.1")
    certificate, key_file, trusted, keys = (tmp_path / name for name in ("tls.crt", "tls.key", "ca.crt", "keys.toml"))
    certificate.write_bytes(b"".join(blob.bytes() for blob in issued.cert_chain_pems))
    key_file.write_bytes(issued.private_key_pem.bytes())
    trusted.write_bytes(authority.cert_pem.bytes())
    made = blink("key", "new", "me", "--concurrent-requests", "2")
    keys.write_text(made.stdout)
    key = shown_key(made.stderr)
    settings = {"tls_certificate": certificate, "tls_key": key_file, "api_keys": keys}
    flags = [flag for name, path in settings.items() for flag in ("--set", f"gateway.{name}={path}")]
    product = launch("--workers", "2", *flags)
    product.environment["BLINK_TLS_AUTHORITY"] = str(trusted)
    assert_one_line_failure(product.blink("generate", "hello", "--raw"), "UNAUTHENTICATED")
    product.environment["BLINK_API_KEY"] = key
    done = product.blink("generate", "hello", "--raw", "--max-tokens", "4")
    assert done.returncode == 0, done.stderr
    assert product.blink("status").returncode == 0
    url = product.http
    assert url.startswith("https://")
    context = ssl.create_default_context(cadata=trusted.read_text())
    with httpx2.Client(verify=context, timeout=LIMIT) as transport:
        client = openai.OpenAI(api_key=key, base_url=f"{url}/v1", http_client=transport, max_retries=0)
        (model,) = client.models.list().data
        assert client.completions.create(model=model.id, prompt="hello", max_tokens=4).choices[0].text
        with pytest.raises(openai.AuthenticationError):
            client.with_options(api_key="bk-wrong").models.list()
    assert product.stop() == 0
    assert key not in "\n".join(product.lines)
    assert product.left_behind() == []
