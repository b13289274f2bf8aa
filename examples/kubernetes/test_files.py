"""Checks that these files agree with each other: `python3 -m unittest discover examples/kubernetes`. Needs PyYAML."""

import unittest
from pathlib import Path

try:
    import yaml
except ImportError:
    yaml = None

HERE = Path(__file__).resolve().parent


@unittest.skipIf(yaml is None, "no PyYAML")
class Files(unittest.TestCase):
    def setUp(self):
        self.files = {path.stem: list(yaml.safe_load_all(path.read_text())) for path in sorted(HERE.glob("*.yaml"))}
        self.one = {name: documents[0] for name, documents in self.files.items()}
        self.deployments = [self.one["gpu"], self.one["cpu"]]

    def test_each_file_has_one_object_with_a_name(self):
        kinds = {name: [document["kind"] for document in documents] for name, documents in self.files.items()}
        self.assertEqual(kinds, {
            "cpu": ["Deployment"], "gpu": ["Deployment"], "hpa": ["HorizontalPodAutoscaler"], "keda": ["ScaledObject"],
            "monitor": ["PodMonitor"], "service": ["Service"],
        })
        for document in self.one.values():
            self.assertEqual(document["metadata"]["name"], "tilewright")

    def test_what_selects_replicas_finds_them(self):
        for deployment in self.deployments:
            labels = deployment["spec"]["template"]["metadata"]["labels"]
            selectors = [deployment["spec"]["selector"]["matchLabels"], self.one["service"]["spec"]["selector"],
                         self.one["monitor"]["spec"]["selector"]["matchLabels"]]
            for selector in selectors:
                self.assertEqual(selector, labels)

    def test_what_scales_names_the_deployment(self):
        for name in ("hpa", "keda"):
            target = self.one[name]["spec"]["scaleTargetRef"]
            for deployment in self.deployments:
                self.assertEqual(target, {"apiVersion": deployment["apiVersion"], "kind": deployment["kind"],
                                          "name": deployment["metadata"]["name"]})

    def test_both_scale_by_the_same_measure_and_behaviour(self):
        hpa, keda = self.one["hpa"]["spec"], self.one["keda"]["spec"]
        [metric], [trigger] = hpa["metrics"], keda["triggers"]
        self.assertIn(metric["pods"]["metric"]["name"] + "{", trigger["metadata"]["query"])
        self.assertEqual(metric["pods"]["target"]["averageValue"], trigger["metadata"]["threshold"])
        self.assertEqual(hpa["behavior"], keda["advanced"]["horizontalPodAutoscalerConfig"]["behavior"])
        self.assertEqual([hpa["minReplicas"], hpa["maxReplicas"]], [keda["minReplicaCount"], keda["maxReplicaCount"]])

    def test_ports_probes_and_volumes_belong_together(self):
        for deployment in self.deployments:
            pod = deployment["spec"]["template"]["spec"]
            [container] = pod["containers"]
            ports = {port["name"]: port["containerPort"] for port in container["ports"]}
            probes = [container[probe]["httpGet"]["port"] for probe in ("startupProbe", "readinessProbe", "livenessProbe")]
            named = [self.one["service"]["spec"]["ports"][0]["targetPort"], self.one["monitor"]["spec"]["podMetricsEndpoints"][0]["port"]]
            for port in probes + named:
                self.assertIn(port, ports)
            arguments = container["args"]
            self.assertTrue(all(isinstance(argument, str) for argument in arguments))
            self.assertEqual(arguments[arguments.index("--port") + 1], str(ports["http"]))
            mounts = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
            volumes = {volume["name"]: volume for volume in pod["volumes"]}
            self.assertEqual(set(mounts), set(volumes))
            self.assertTrue(arguments[1].startswith(mounts["models"] + "/"))
            secret = self.one["monitor"]["spec"]["podMetricsEndpoints"][0]["authorization"]["credentials"]
            self.assertEqual(volumes["key"]["secret"]["secretName"], secret["name"])
            self.assertEqual(arguments[arguments.index("--api-key-file") + 1], f"{mounts['key']}/{secret['key']}")

    def test_replicas_run_as_the_user_of_the_image(self):
        image = (HERE.parent.parent / "Containerfile").read_text()
        for deployment in self.deployments:
            rights = deployment["spec"]["template"]["spec"]["securityContext"]
            self.assertIn(f"USER {rights['runAsUser']}:{rights['runAsGroup']}\n", image)
            self.assertTrue(rights["runAsNonRoot"])


if __name__ == "__main__":
    unittest.main()
