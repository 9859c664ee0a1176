"""Detached signatures of bundles, by ``ssh-keygen``.

The format is OpenSSH's (``ssh-keygen -Y sign``), so that the keys are those that people have already, in a
file, in an agent or on a security token, and a signature can be checked without this package::

    ssh-keygen -Y verify -f allowed_signers -I kernels-dsl -n kernels-dsl-bundle -s X.sig < X
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

from lowering import scratch
from lowering.errors import LoweringError, Untrusted, plain

# What a signature is for: one that was made for anything else, a commit or a mail, is not one of a bundle.
NAMESPACE = "kernels-dsl-bundle"
SIGNER = "kernels-dsl"
_KEY_TYPES = ("ssh-", "ecdsa-", "sk-")


def signature_of(path: str | os.PathLike[str]) -> Path:
    """Path of a file's signature: beside it, with ``.sig`` added to its name."""
    return Path(f"{os.fspath(path)}.sig")


def sign(data: bytes, key: str | os.PathLike[str]) -> bytes:
    """The signature of a file's bytes.

    :param key: an SSH private key, or the public one of a key that the agent or a security token holds.
    :raises LoweringError: if it cannot be made.
    """
    if not Path(key).is_file():
        raise LoweringError(
            f"the key {os.fspath(key)} is not a file; make one: ssh-keygen -t ed25519 -f {os.fspath(key)}"
        )
    # It asks for a passphrase, or a touch of the token, on the terminal.
    done = _ssh_keygen("-q", "-Y", "sign", "-n", NAMESPACE, "-f", os.fspath(key), data=data)
    if done.returncode != 0 or not done.stdout:
        raise LoweringError(f"{os.fspath(key)} cannot sign: {_said(done)}")
    return done.stdout


def verify(data: bytes, signature: Path, key: str | os.PathLike[str]) -> None:
    """Check the signature of a file's bytes.

    :param key: a file of SSH public keys, one a line; any of them may have signed.
    :raises Untrusted: if there is no signature, it is of other bytes, or by another key.
    :raises LoweringError: if ``key`` holds no public key.
    """
    listed = _allowed_signers(key)
    if not signature.is_file():
        raise Untrusted(f"it is not signed: there is no {signature}")
    with scratch.folder() as folder:
        allowed = folder / "allowed_signers"
        allowed.write_text(listed)
        chosen = ("-f", str(allowed), "-I", SIGNER, "-n", NAMESPACE, "-s", str(signature))
        done = _ssh_keygen("-Y", "verify", *chosen, data=data)
    if done.returncode != 0:
        raise Untrusted(f"its signature {signature} is not by a key in {os.fspath(key)}: {_said(done)}")


def _allowed_signers(key: str | os.PathLike[str]) -> str:
    """The content of an allowed-signers file that lets these keys sign bundles and nothing else."""
    try:
        lines = Path(key).read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise LoweringError(f"the public key {os.fspath(key)} cannot be read: {error}") from error
    keys = [line.strip() for line in lines if line.strip() and not line.strip().startswith("#")]
    if not keys or not all(line.startswith(_KEY_TYPES) and " " in line for line in keys):
        raise LoweringError(
            f"{os.fspath(key)} is not a file of SSH public keys, a line each as in 'ssh-ed25519 AAAA...'"
        )
    return "".join(f'{SIGNER} namespaces="{NAMESPACE}" {line}\n' for line in keys)


def _ssh_keygen(*arguments: str, data: bytes) -> subprocess.CompletedProcess[bytes]:
    try:
        return subprocess.run(["ssh-keygen", *arguments], input=data, capture_output=True, check=False)
    except FileNotFoundError:
        raise LoweringError("signatures need the program ssh-keygen, of OpenSSH 8.2 or later") from None


def _said(done: subprocess.CompletedProcess[bytes]) -> str:
    text = plain((done.stderr or done.stdout).decode(errors="replace")).strip()
    return text or f"ssh-keygen ended with {done.returncode}"
