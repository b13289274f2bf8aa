"""What the workflows say of themselves and of the files that they use: `python3 -B -m unittest discover .github`. Needs PyYAML."""

import importlib.machinery
import importlib.util
import re
import shutil
import tempfile
import tomllib
import unittest
from pathlib import Path

try:
    import yaml
except ImportError:
    yaml = None

ROOT = Path(__file__).resolve().parent.parent


def script(name):
    """A script of scripts/, as a module."""
    loader = importlib.machinery.SourceFileLoader(name.replace("-", "_"), str(ROOT / "scripts" / name))
    module = importlib.util.module_from_spec(importlib.util.spec_from_loader(loader.name, loader))
    loader.exec_module(module)
    return module


@unittest.skipIf(yaml is None, "no PyYAML")
class Workflows(unittest.TestCase):
    def setUp(self):
        self.files = {path.name: path.read_text() for path in sorted((ROOT / ".github/workflows").glob("*.yml"))}
        self.flows = {name: yaml.safe_load(text) for name, text in self.files.items()}
        self.jobs = {(name, job): body for name, flow in self.flows.items() for job, body in flow["jobs"].items()}
        self.release = self.flows["release.yml"]["jobs"]

    def test_every_action_is_pinned_by_a_commit_and_says_its_version(self):
        texts = {**self.files, "action.yml": (ROOT / ".github/actions/rust/action.yml").read_text()}
        commits = {}
        for name, text in texts.items():
            for used in re.findall(r"uses: *(.*)$", text, flags=re.M):
                if used.startswith("./"):
                    self.assertTrue((ROOT / used / "action.yml").is_file(), f"{name}: {used}")
                    continue
                pinned = re.fullmatch(r"([\w./-]+)@([0-9a-f]{40}) # (v\d+\.\d+\.\d+)", used)
                self.assertTrue(pinned, f"{name}: {used}")
                commits.setdefault(pinned[1], set()).add(pinned.group(2, 3))
        for action, pins in commits.items():
            self.assertEqual(len(pins), 1, action)

    def test_a_job_may_do_no_more_than_it_has_to(self):
        wide = {}
        for name, flow in self.flows.items():
            self.assertEqual(flow["permissions"], {"contents": "read"}, name)
        for key, job in self.jobs.items():
            more = {what: how for what, how in job.get("permissions", {}).items() if (what, how) != ("contents", "read")}
            if more:
                wide[key] = more
        attested = {"id-token": "write", "attestations": "write"}
        self.assertEqual(wide, {
            ("pages.yml", "deploy"): {"pages": "write", "id-token": "write"},
            ("release.yml", "archives"): attested,
            ("release.yml", "draft"): {"contents": "write"},
            ("release.yml", "publish-crates"): {"id-token": "write"},
            ("release.yml", "publish-package"): {"id-token": "write"},
            ("release.yml", "publish-image"): {**attested, "packages": "write"},
            ("release.yml", "publish-release"): {"contents": "write"},
        })

    def test_every_job_has_a_limit_and_leaves_no_credentials_behind(self):
        for key, job in self.jobs.items():
            self.assertIn("timeout-minutes", job, key)
            for step in job["steps"]:
                if step.get("uses", "").startswith("actions/checkout@"):
                    self.assertEqual(step.get("with", {}).get("persist-credentials"), False, key)

    def test_no_expression_is_pasted_into_a_script(self):
        for key, job in self.jobs.items():
            for step in job["steps"]:
                self.assertNotIn("${{", step.get("run", ""), key)

    def test_rust_comes_from_one_place(self):
        for name, text in self.files.items():
            self.assertNotIn("rustup", text, name)
            self.assertNotIn("stable", text, name)

    def test_scripts_and_tests_that_are_named_are_there(self):
        for key, job in self.jobs.items():
            for step in job["steps"]:
                for name in re.findall(r"(?<![\w./])(?:scripts|\.ci)/[\w.-]+", step.get("run", "")):
                    self.assertTrue((ROOT / name).is_file(), f"{key}: {name}")
                for name in re.findall(r"--test ([\w-]+)", step.get("run", "")):
                    files = (f"tests/{name}.rs", f"tests/{name}/main.rs", f"crates/cli/tests/{name}.rs")
                    self.assertTrue(any((ROOT / file).is_file() for file in files), f"{key}: {name}")

    def test_other_systems_test_all_features(self):
        job = self.jobs["ci.yml", "other-systems"]
        self.assertEqual([system.split("-")[0] for system in job["strategy"]["matrix"]["os"]], ["macos", "windows"])
        commands = [step["run"] for step in job["steps"] if step.get("run", "").startswith("cargo ")]
        self.assertEqual([command.split()[1] for command in commands], ["clippy", "test"])
        for command in commands:
            self.assertIn("--all-features", command)

    def test_nothing_is_published_before_all_is_built_or_from_a_cache(self):
        self.assertEqual(set(self.release["draft"]["needs"]), {"archives", "package", "image"})
        for name, job in self.release.items():
            if name.startswith("publish-") and name != "publish-release":
                self.assertEqual(job["needs"], "draft", name)
            if name.startswith("publish-") or name == "draft":
                self.assertEqual(job["environment"], "release", name)
            for step in job["steps"]:
                self.assertNotIn("rust-cache", step.get("uses", ""), name)
                self.assertNotIn("cache", step.get("with", {}), name)
        self.assertEqual(self.release["draft"]["if"], "github.ref_type == 'tag'")

    def test_binstall_finds_the_archive_of_every_target(self):
        crate = tomllib.loads((ROOT / "crates/cli/Cargo.toml").read_text())["package"]
        binstall, archives = crate["metadata"]["binstall"], script("release-archive")
        self.assertEqual(binstall["pkg-url"].split("tilewright-")[0], "{ repo }/releases/download/v{ version }/")
        targets = [entry["target"] for entry in self.release["archives"]["strategy"]["matrix"]["include"]]
        self.assertEqual(sorted(targets), sorted(set(targets)))
        self.assertEqual({target.split("-", 1)[1] for target in targets}, {"unknown-linux-gnu", "apple-darwin", "pc-windows-msvc"})
        for target in targets:
            form = binstall.get("overrides", {}).get(target, binstall)["pkg-fmt"]
            values = {"version": "1.2.3", "target": target, "bin": "tilewright",
                      "archive-suffix": {"tgz": ".tar.gz", "zip": ".zip"}[form], "binary-ext": ".exe" if "windows" in target else ""}
            filled = [re.sub(r"\{ ([\w-]+) \}", lambda found: values[found[1]], template)
                      for template in (binstall["pkg-url"].split("v{ version }/")[1], binstall["bin-dir"])]
            name = archives.name_of("1.2.3", target, False)
            self.assertEqual(filled, [archives.file_of(name, target), f"{name}/{archives.program_of(target)}"])
        self.assertLessEqual(set(targets), set(tomllib.loads((ROOT / "deny.toml").read_text())["graph"]["targets"]))


class Release(unittest.TestCase):
    """scripts/check-release sees each place that says something else."""

    FILES = ["Cargo.toml", "Cargo.lock", "CHANGELOG.md", "Containerfile", "npm/package.json", "npm/package-lock.json",
             ".github/actions/rust/action.yml", ".github/workflows/ci.yml"]

    def setUp(self):
        self.check = script("check-release")
        self.version = tomllib.loads((ROOT / "Cargo.toml").read_text())["workspace"]["package"]["version"]
        scratch = tempfile.TemporaryDirectory()
        self.addCleanup(scratch.cleanup)
        self.copy = Path(scratch.name)
        for name in self.FILES:
            (self.copy / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, self.copy / name)

    def edit(self, name, old, new):
        text = (self.copy / name).read_text()
        self.assertIn(old, text, name)
        (self.copy / name).write_text(text.replace(old, new, 1))

    def test_this_repository_says_the_same_everywhere(self):
        self.assertEqual(self.check.problems(ROOT), [])

    def test_a_place_that_says_something_else_is_named(self):
        own = f'"{self.version}"'
        edits = [("npm/package.json", own, '"9.9.9"'), ("npm/package-lock.json", own, '"9.9.9"'), ("npm/package.json", "/issues", "/bugs"),
                 ("Cargo.toml", f'path = ".", version = {own}', 'path = ".", version = "9.9.9"'), ("npm/package.json", "git+https://", "git+ssh://"), (".github/workflows/ci.yml", 'toolchain: "', 'toolchain: "9'),
                 ("Containerfile", "library/rust:1.", "library/rust:9."), ("Cargo.toml", own, '"9.9.9"')]
        for name, old, new in edits:
            shutil.copy(ROOT / name, self.copy / name)
            self.edit(name, old, new)
            self.assertNotEqual(self.check.problems(self.copy), [], name)
            shutil.copy(ROOT / name, self.copy / name)

    def test_a_tag_needs_its_version_and_a_section_with_a_date(self):
        heading = self.check.section((self.copy / "CHANGELOG.md").read_text(), self.version)[0]
        self.edit("CHANGELOG.md", f"## {heading}", f"## {self.version}, 2026-01-31")
        self.assertEqual(self.check.problems(self.copy, f"v{self.version}"), [])
        self.assertIn("the tag is 'v9.9.9'", self.check.problems(self.copy, "v9.9.9")[0])
        self.assertNotEqual(self.check.problems(self.copy, self.version), [])
        self.edit("CHANGELOG.md", "2026-01-31", "unreleased")
        self.assertIn("unreleased", self.check.problems(self.copy, f"v{self.version}")[0])


class Notices(unittest.TestCase):
    """scripts/notices chooses a licence and takes its text."""

    def texts(self, license, files):
        with tempfile.TemporaryDirectory() as folder:
            for name, text in files.items():
                Path(folder, name).write_text(text)
            package = {"name": "tile", "version": "1.0.0", "license": license, "authors": ["A <a@example.org>"],
                       "manifest_path": str(Path(folder, "Cargo.toml"))}
            return script("notices").texts_of(package)

    def test_one_of_several_licences_is_enough_and_all_of_a_conjunction(self):
        both = {"LICENSE-APACHE": "apache", "LICENSE-MIT": "mit"}
        self.assertEqual(self.texts("MIT OR Apache-2.0", both), ["apache"])
        self.assertEqual(self.texts("MIT/Apache-2.0", {"LICENSE-MIT": "mit"}), ["mit"])
        self.assertEqual(self.texts("(MIT OR Apache-2.0) AND Unicode-3.0", {**both, "LICENSE-UNICODE": "unicode"}), ["apache", "unicode"])
        self.assertEqual(self.texts("MIT AND BSD-3-Clause", {"LICENSE": "mit", "LICENSE.other": "bsd"}), ["mit", "bsd"])
        self.assertEqual(self.texts("MIT OR Apache-2.0", {**both, "NOTICE": "notice", "license.rs": "no text"}), ["apache", "notice"])

    def test_a_usual_licence_without_a_file_has_its_usual_text(self):
        self.assertIn("TERMS AND CONDITIONS", self.texts("Apache-2.0", {})[0])
        [text] = self.texts("MIT", {})
        self.assertIn("Copyright (c) A\n", text)
        self.assertIn("Permission is hereby granted", text)
        self.assertEqual(self.texts("BSD-3-Clause", {}), [])

    def test_nothing_is_lost_that_is_more_than_apaches_own_text(self):
        apache, more = "Apache License Version 2.0 " + "a" * 9000, "Apache License Version 2.0 " + "a" * 9000 + " and " + "b" * 2000
        with tempfile.TemporaryDirectory() as folder:
            packages = []
            for name, text in (("one", apache), ("two", apache.replace(" ", "\n")), ("three", more)):
                Path(folder, name).mkdir()
                Path(folder, name, "LICENSE").write_text(text)
                packages.append({"name": name, "version": "1.0.0", "license": "Apache-2.0", "authors": [],
                                 "manifest_path": str(Path(folder, name, "Cargo.toml"))})
            by_text, without = script("notices").collect(packages)
        self.assertEqual([[package["name"] for package in found] for _, found in by_text.values()], [["one", "two"], ["three"]])
        self.assertEqual(without, [])


if __name__ == "__main__":
    unittest.main()
