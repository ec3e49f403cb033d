"""Packages, units and images: made with the tools of this machine from the binary under test, and looked at."""

import hashlib
import json
import os
import pathlib
import re
import shutil
import subprocess
import tarfile

import pytest
import yaml
from conftest import binary
from manifests import ROOT, output_of, workspace_version

SYSTEMD = ROOT / "deploy" / "systemd"
UNITS = sorted(SYSTEMD.glob("*.service"))
# What `systemd-analyze security` calls "OK" begins here: lower is safer.
MAX_EXPOSURE = 2.5


@pytest.fixture(scope="module")
def binaries(tmp_path_factory) -> pathlib.Path:
    """A folder with both programs, as `cargo build` leaves them."""
    folder = pathlib.Path(binary()).resolve().parent
    if not (folder / "kvctl").is_file():
        pytest.skip(f"kvctl is not beside {binary()}")
    return folder


def needed(name: str) -> str:
    path = shutil.which(name)
    if path is None:
        pytest.skip(f"{name} is not on the path")
    return path


@pytest.fixture
def installed_units(tmp_path) -> pathlib.Path:
    """The units in a root of their own, beside a program that they start."""
    units = tmp_path / "usr/lib/systemd/system"
    units.mkdir(parents=True)
    for unit in UNITS:
        shutil.copy(unit, units)
    for target in ("network-online.target", "multi-user.target", "sysinit.target", "basic.target", "shutdown.target"):
        (units / target).write_text("[Unit]\nDescription=A target of this test\nDefaultDependencies=no\n")
    (tmp_path / "usr/bin").mkdir()
    shutil.copy(binary(), tmp_path / "usr/bin/kvik")
    return tmp_path


def test_every_role_has_a_unit_that_systemd_finds_nothing_wrong_with(installed_units):
    analyze = needed("systemd-analyze")
    assert {unit.stem for unit in UNITS} == {
        f"kvik-{role}" for role in ("gateway", "coordinator", "worker", "indexer", "store", "epp", "engines")
    }
    names = [f"{unit.stem}.service" for unit in UNITS]
    command = [analyze, "verify", "--man=no", f"--root={installed_units}", *names]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    # Of units that this test has not made it may say anything.
    complaints = [line for line in done.stderr.splitlines() if "kvik-" in line]
    assert done.returncode == 0, done.stderr
    assert not complaints, done.stderr


@pytest.mark.parametrize("unit", UNITS, ids=lambda unit: unit.stem)
def test_a_unit_leaves_little_to_a_service_that_was_broken_into(unit: pathlib.Path):
    command = [needed("systemd-analyze"), "security", "--offline=true", "--no-pager", str(unit)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    found = re.search(r"Overall exposure level for \S+: ([0-9.]+)", done.stdout)
    assert found, done.stdout + done.stderr
    assert float(found.group(1)) <= MAX_EXPOSURE, done.stdout


@pytest.mark.parametrize("unit", UNITS, ids=lambda unit: unit.stem)
def test_the_binary_knows_the_command_line_of_a_unit_and_has_time_to_drain(unit: pathlib.Path):
    text = unit.read_text()
    (command,) = re.findall(r"^ExecStart=/usr/bin/kvik (.*)$", text, re.MULTILINE)
    words = [word for word in command.split() if not word.startswith(("-", "/"))]
    help_text = output_of(binary(), *words, "--help")
    assert set(re.findall(r"--[a-z-]+", command)) <= set(re.findall(r"--[a-z-]+", help_text))
    (stop_s,) = re.findall(r"^TimeoutStopSec=(\d+)$", text, re.MULTILINE)
    assert grace_s_of(unit) < int(stop_s)


def grace_s_of(unit: pathlib.Path) -> int:
    """The longest time that the service of a unit takes to drain, by the packaged configuration."""
    settings = json.loads(output_of(binary(), "config", "--config", str(SYSTEMD / "kvik.yaml"), "--json"))
    role = unit.stem.removeprefix("kvik-")
    if role == "engines":
        config = yaml.safe_load((SYSTEMD / "engines.yaml").read_text())
        drain_s = config["gateway"].get("drain_grace_s", settings["gateway"]["drain_grace_s"]["value"])
        # What the controller gives itself, with the default of docs/engines.md.
        return drain_s + 2 * max(engine.get("stop_timeout_s", 30) for engine in config["engines"])
    section = {"indexer": "gateway", "epp": "gateway"}.get(role, role)
    return settings[section].get("drain_grace_s", {"value": 10})["value"]


def test_the_packaged_configuration_makes_three_roles_one_service():
    config = yaml.safe_load((SYSTEMD / "kvik.yaml").read_text())
    assert config["gateway"]["coordinators"] == [f"http://{config['coordinator']['listen']}"]
    assert config["worker"]["coordinators"] == config["gateway"]["coordinators"]
    assert all(config[role]["listen"].startswith("127.0.0.1:") for role in ("gateway", "coordinator", "worker"))


def test_services_of_the_packaged_configuration_listen_at_addresses_of_their_own():
    config = yaml.safe_load((SYSTEMD / "kvik.yaml").read_text())
    engines = json.loads(output_of(binary(), "engines", "check", "--config", str(SYSTEMD / "engines.yaml"), "--json"))
    (picker,) = re.findall(r"--http-listen=(\S+)", (SYSTEMD / "kvik-epp.service").read_text())
    listens = [config[role]["listen"] for role in ("gateway", "coordinator", "worker", "epp")]
    listens += [picker, engines["gateway"], *(engine["url"].removeprefix("http://") for engine in engines["engines"])]
    assert len(listens) == len(set(listens)), listens
    assert all(address.startswith("127.0.0.1:") for address in listens)


def test_engines_outlive_a_controller_that_is_killed_with_all_that_they_use():
    unit = settings_of(SYSTEMD / "kvik-engines.service")
    assert unit["KillMode"] == "process"
    # One that has no memory left must not end the others.
    assert unit["OOMPolicy"] == "continue"
    # Systemd removes these with the service, though engines go on.
    assert unit["RuntimeDirectoryPreserve"] == "yes"
    assert "PrivateTmp" not in unit
    # Code that is made at run time.
    assert "MemoryDenyWriteExecute" not in unit
    state = "/run/kvik/engines"
    assert state.removeprefix("/run/") in unit["RuntimeDirectory"].split()
    assert unit["ExecStart"].endswith(f"--config /etc/kvik/engines.yaml --state {state}")
    assert unit["ExecReload"] == f"/usr/bin/kvik engines reload --state {state}"
    logs = yaml.safe_load((SYSTEMD / "engines.yaml").read_text())["logs"]["folder"]
    assert logs.removeprefix("/var/log/") in unit["LogsDirectory"].split()
    # An upgrade of the package stops the controller alone, and starts the new one.
    upgrade = (ROOT / "deploy/debian/postinst").read_text()
    assert f"kvik engines stop --leave-running --state {state}" in upgrade
    (restarted,) = re.findall(r"systemctl try-restart (.*)", upgrade)
    assert set(restarted.split()) == {unit.stem for unit in UNITS} - {"kvik-engines"}


@pytest.mark.parametrize("name", ["kvik-worker", "kvik-engines"])
def test_services_that_compute_reach_gpus(name: str):
    # Of systemd before 253 ProtectClock allows the clock, and with that no other device.
    assert not {"PrivateDevices", "DevicePolicy", "DeviceAllow", "ProtectClock"} & settings_of(
        SYSTEMD / f"{name}.service"
    ).keys()


def settings_of(unit: pathlib.Path) -> dict[str, str]:
    """The settings of a unit that are there once."""
    lines = re.findall(r"^([A-Za-z]+)=(.*)$", unit.read_text(), re.MULTILINE)
    return {name: value for name, value in lines if [other for other, _ in lines].count(name) == 1}


def test_the_removal_of_the_package_ends_every_service():
    (ended,) = re.findall(r"disable --now (.*)", (ROOT / "deploy/debian/prerm").read_text())
    assert set(ended.split()) == {unit.stem for unit in UNITS}


def test_the_debian_package_has_programs_units_pages_and_completions(binaries, tmp_path):
    needed("dpkg-deb")
    # A debug build is large, and how well it is compressed does not matter here.
    output_of("env", "COMPRESSION=none", str(ROOT / "deploy/debian/build"), str(binaries), str(tmp_path))
    (package,) = tmp_path.glob(f"kvik_{workspace_version()}_*.deb")
    fields = output_of("dpkg-deb", "--field", str(package))
    assert f"Version: {workspace_version()}" in fields
    assert re.search(r"^Depends: libc6 \(>= 2\.\d+\), libgcc-s1$", fields, re.MULTILINE)
    root = tmp_path / "root"
    output_of("dpkg-deb", "--extract", str(package), str(root))
    for path in [
        "usr/bin/kvctl",
        "etc/kvik/kvik.yaml",
        "etc/kvik/engines.yaml",
        "usr/lib/sysusers.d/kvik.conf",
        "usr/share/man/man1/kvik-gateway.1.gz",
        "usr/share/man/man1/kvctl.1.gz",
        "usr/share/bash-completion/completions/kvik",
        "usr/share/zsh/vendor-completions/_kvctl",
        "usr/share/fish/vendor_completions.d/kvik.fish",
        "usr/share/doc/kvik/copyright",
        "usr/share/doc/kvik/engines.md.gz",
        *(f"usr/lib/systemd/system/{unit.name}" for unit in UNITS),
    ]:
        assert (root / path).is_file(), path
    assert output_of(str(root / "usr/bin/kvik"), "--version") == f"kvik {workspace_version()}\n"
    listing = output_of("dpkg-deb", "--contents", str(package))
    assert all(line.split()[1] == "root/root" for line in listing.splitlines())
    scripts = tmp_path / "control"
    output_of("dpkg-deb", "--control", str(package), str(scripts))
    assert (scripts / "conffiles").read_text().split() == ["/etc/kvik/kvik.yaml", "/etc/kvik/engines.yaml"]
    for name in ("postinst", "prerm", "postrm"):
        output_of("sh", "-n", str(scripts / name))


def test_units_name_manual_pages_that_there_are(tmp_path):
    output_of(binary(), "man", str(tmp_path))
    for unit in UNITS:
        (page,) = re.findall(r"^Documentation=man:(\S+)\(1\)$", unit.read_text(), re.MULTILINE)
        assert (tmp_path / f"{page}.1").is_file(), page


@pytest.fixture(scope="module")
def image_root(binaries, tmp_path_factory) -> pathlib.Path:
    needed("ldd")
    root = tmp_path_factory.mktemp("image") / "root"
    output_of(str(ROOT / "deploy/image/root"), str(binaries), str(root))
    return root


def test_the_image_has_what_the_binary_needs_and_no_shell(image_root):
    chroot = needed("chroot")
    if os.geteuid() != 0:
        pytest.skip("only root can change the root folder")
    run = [chroot, "--userspec=65532:65532", str(image_root), "/usr/bin/kvik"]
    assert output_of(*run, "--version") == f"kvik {workspace_version()}\n"
    # The bundled model answers: nothing is missing that is loaded later.
    assert output_of(*run, "generate", "--prompt", "Once upon a time", "--max-tokens", "4").strip()
    files = {path.name for path in image_root.rglob("*") if path.is_file()}
    assert not files & {"sh", "bash", "dash", "busybox"}
    assert len(files) < 20, files


def test_the_same_folder_gives_the_same_archive(tmp_path):
    root = tmp_path / "root"
    (root / "usr/bin").mkdir(parents=True)
    (root / "usr/bin/kvik").write_text("a program")
    archives = [tmp_path / "one.tar", tmp_path / "two.tar"]
    for archive in archives:
        output_of(str(ROOT / "deploy/image/archive.py"), str(root), "kvik:test", str(archive))
        (root / "usr/bin/kvik").touch()
    assert archives[0].read_bytes() == archives[1].read_bytes()


def test_the_archive_of_the_image_is_one_that_its_own_digests_prove(image_root, tmp_path):
    archive = tmp_path / "kvik.oci.tar"
    command = [str(ROOT / "deploy/image/archive.py"), str(image_root), f"kvik:{workspace_version()}"]
    assert "MB" in output_of(*command, str(archive))
    with tarfile.open(archive) as files:
        content = {member.name: files.extractfile(member).read() for member in files.getmembers()}
    for name, blob in content.items():
        if name.startswith("blobs/"):
            assert name == f"blobs/sha256/{hashlib.sha256(blob).hexdigest()}"
    (described,) = json.loads(content["index.json"])["manifests"]
    manifest = json.loads(content["blobs/" + described["digest"].replace(":", "/")])
    config = json.loads(content["blobs/" + manifest["config"]["digest"].replace(":", "/")])
    assert config["config"]["User"] == "65532:65532"
    assert config["config"]["Entrypoint"] == ["/usr/bin/kvik"]
    containerfile = (ROOT / "deploy/image/Containerfile").read_text()
    assert 'ENTRYPOINT ["/usr/bin/kvik"]' in containerfile
    assert "USER 65532:65532" in containerfile


def test_documents_of_the_release_have_the_version_of_the_workspace():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert citation["version"] == workspace_version()
    assert f"kvik:{workspace_version()}" in (ROOT / "deploy/image/Containerfile").read_text()
    assert (ROOT / "SECURITY.md").is_file()
