"""An etcd of one member."""

from __future__ import annotations

import base64
import datetime
import ipaddress
import json
import shutil
import signal
import socket
import ssl
import subprocess
import time
import urllib.error
import urllib.request
from pathlib import Path
from types import TracebackType
from typing import Any

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

INSTALLED = shutil.which("etcd") is not None
_DEADLINE_S = 20.0


class EtcdServer:
    """Runs inside a `with`; its data is in `folder`.

    address   at which it serves
    has_tls   it shows a certificate, and wants one of clients; ca.pem, certificate.pem and key.pem are in the folder
    """

    def __init__(self, folder: Path, address: str = "127.0.0.1", has_tls: bool = False, *flags: str) -> None:
        self._folder, self._address, self._has_tls, self._flags = folder, address, has_tls, flags
        self.port, self._peers = _free_port(address), _free_port("127.0.0.1")
        self._token, self.variables = "", dict[str, str]()
        if has_tls:
            make_certificates(folder, address)
            names = {"CACERT": "ca.pem", "CERT": "certificate.pem", "KEY": "key.pem"}
            self.variables = {f"ETCDCTL_{name}": str(folder / file) for name, file in names.items()}
        self._start()

    def _start(self) -> None:
        own, peers = self._url, f"http://127.0.0.1:{self._peers}"
        command = ["etcd", "--data-dir", str(self._folder / "etcd"), *self._flags]
        command += ["--listen-client-urls", own, "--advertise-client-urls", own]
        command += ["--listen-peer-urls", peers, "--initial-advertise-peer-urls", peers]
        command += ["--initial-cluster", f"default={peers}"]
        if self._has_tls:
            command += ["--client-cert-auth", "--trusted-ca-file", str(self._folder / "ca.pem")]
            command += ["--cert-file", str(self._folder / "certificate.pem")]
            command += ["--key-file", str(self._folder / "key.pem")]
        with (self._folder / "etcd.log").open("ab") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=log)
        deadline_s = time.monotonic() + _DEADLINE_S
        while not self._is_healthy():
            assert time.monotonic() < deadline_s, (self._folder / "etcd.log").read_text()
            time.sleep(0.05)

    def __enter__(self) -> EtcdServer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.kill()

    def url(self, prefix: str = "jobs/a") -> str:
        """For --state."""
        return f"etcd://{self._address}:{self.port}/{prefix}"

    def ask(self, path: str, **body: Any) -> Any:
        """The answer to a request, past the client of Farandole."""
        with self._open(f"v3/{path}", json.dumps(body).encode(), _DEADLINE_S) as response:
            return json.loads(response.read())

    def require_password(self, password: str) -> None:
        """Let in only the user "root" with this password."""
        self.ask("auth/user/add", name="root", password=password)
        self.ask("auth/user/grant", user="root", role="root")
        self.ask("auth/enable")
        self._token = self.ask("auth/authenticate", name="root", password=password)["token"]

    def remove(self, prefix: str) -> None:
        """Remove all keys that begin with this."""
        first, end = (
            base64.b64encode(each.encode()).decode() for each in (prefix, prefix[:-1] + chr(ord(prefix[-1]) + 1))
        )
        assert int(self.ask("kv/deleterange", key=first, range_end=end)["deleted"])

    def suspend(self) -> None:
        """It answers nobody until `resume()`."""
        self.process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        """It goes on."""
        self.process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        """kill -9."""
        self.process.kill()
        self.process.wait()

    def restart(self) -> None:
        """Start it again, with its data."""
        self._start()

    def keys(self) -> int:
        """How many there are."""
        return int(self.ask("kv/range", key="AA==", range_end="AA==", count_only=True).get("count", 0))

    @property
    def _url(self) -> str:
        return f"{'https' if self._has_tls else 'http'}://{self._address}:{self.port}"

    def _open(self, path: str, data: bytes | None, timeout_s: float) -> Any:
        context = None
        if self._has_tls:
            context = ssl.create_default_context(cafile=str(self._folder / "ca.pem"))
            context.load_cert_chain(self._folder / "certificate.pem", self._folder / "key.pem")
        request = urllib.request.Request(f"{self._url}/{path}", data)
        if self._token:
            request.add_header("Authorization", self._token)
        return urllib.request.urlopen(request, timeout=timeout_s, context=context)

    def _is_healthy(self) -> bool:
        try:
            with self._open("health", None, 1.0) as response:
                return bool(json.loads(response.read())["health"] == "true")
        except (urllib.error.URLError, OSError):
            return False


def make_certificates(folder: Path, address: str) -> None:
    """Write ca.pem, and certificate.pem with key.pem for a server at this address, which is a client, too: etcd's
    gateway uses it for its own connection to etcd."""
    authority, key = ec.generate_private_key(ec.SECP256R1()), ec.generate_private_key(ec.SECP256R1())
    own = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "a test")])
    for name, subject_key in (("ca.pem", authority), ("certificate.pem", key)):
        now = datetime.datetime.now(datetime.UTC)
        issued = x509.CertificateBuilder().issuer_name(own).serial_number(x509.random_serial_number())
        issued = issued.not_valid_before(now - datetime.timedelta(hours=1))
        issued = issued.not_valid_after(now + datetime.timedelta(hours=1)).public_key(subject_key.public_key())
        if subject_key is authority:
            issued = issued.subject_name(own).add_extension(x509.BasicConstraints(ca=True, path_length=None), True)
        else:
            names = x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address(address))])
            issued = issued.subject_name(x509.Name([])).add_extension(names, True)
        (folder / name).write_bytes(issued.sign(authority, hashes.SHA256()).public_bytes(serialization.Encoding.PEM))
    (folder / "key.pem").write_bytes(
        key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    )


def _free_port(address: str) -> int:
    with socket.socket() as probe:
        probe.bind((address, 0))
        return int(probe.getsockname()[1])
