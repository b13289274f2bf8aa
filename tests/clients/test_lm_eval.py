"""lm-eval, unchanged, against a running server: a task of two kinds of requests by `local-completions`, which tokenizes by the
server, and one by `local-chat-completions`.

`scripts/serve-clients` starts the server and runs this with its address in SERVER.
"""

import json
import os
import tempfile
import unittest
from pathlib import Path

import openai

SERVER = os.environ["SERVER"]
KEY = os.environ["OPENAI_API_KEY"] = "a key"
QUERIES = ["Once upon a time", "The dragon was very", "One day, Tim went to the"]
MODEL = {"model": "story", "max_retries": 1, "auth_token": KEY, "max_length": 512}


def task(name, output, more):
    """A task of lm-eval, whose documents are in a file beside it."""
    data = {"test": f"{name}.jsonl"}
    return {"task": name, "dataset_path": "json", "dataset_kwargs": {"data_files": data}, "test_split": "test", "output_type": output, "doc_to_text": "query", **more}


class LmEval(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        client = openai.OpenAI(base_url=f"{SERVER}/v1", api_key=KEY, max_retries=0)
        # The model's own continuations must win, and be known as greedy.
        # lm-eval's prompts have no BOS.
        asked = dict(model="story", max_tokens=4, temperature=0, extra_body={"add_special_tokens": False})
        own = [client.completions.create(prompt=query, **asked).choices[0].text for query in QUERIES]
        cls.documents = [{"query": query, "choices": [" zebra", text, " 77"], "gold": 1} for query, text in zip(QUERIES, own)]
        folder = tempfile.TemporaryDirectory()
        cls.addClassCleanup(folder.cleanup)
        os.chdir(folder.name)
        os.environ.update(HF_HOME=folder.name, HF_HUB_OFFLINE="1", HF_DATASETS_OFFLINE="1")
        choices = {"doc_to_target": "gold", "doc_to_choice": "choices", "target_delimiter": "", "metric_list": [{"metric": "acc"}]}
        until = {"until": ["\n", "."], "max_gen_toks": 8, "temperature": 0.0, "do_sample": False}
        generated = {"doc_to_target": "choices", "generation_kwargs": until, "metric_list": [{"metric": "exact_match"}]}
        cls.tasks = [task("choose", "multiple_choice", choices), task("tell", "generate_until", generated)]
        for one in cls.tasks:
            Path(f"{one['task']}.jsonl").write_text("".join(f"{json.dumps(document)}\n" for document in cls.documents))
        # It reads HF_HOME.
        global lm_eval
        import lm_eval
        import lm_eval.tasks

        # Reading its own thousands of tasks takes long.
        cls.known = lm_eval.tasks.TaskManager(include_defaults=False)

    def evaluate(self, model, path, tasks, **more):
        options = {**MODEL, "base_url": f"{SERVER}{path}"}
        more |= {"task_manager": self.known, "log_samples": True, "bootstrap_iters": 0}
        return lm_eval.simple_evaluate(model=model, model_args=options, tasks=tasks, **more)

    def test_completions_choose_the_models_own_texts(self):
        found = self.evaluate("local-completions", "/v1/completions", self.tasks, batch_size=4)
        self.assertEqual(found["results"]["choose"]["acc,none"], 1.0)
        for sample in found["samples"]["choose"]:
            scores = [response[0] for response in sample["filtered_resps"]]
            self.assertEqual(max(scores), scores[1])
            self.assertEqual([response[1] for response in sample["filtered_resps"]], [False, True, False])
        self.assertTrue(any(sample["filtered_resps"][0] for sample in found["samples"]["tell"]))

    def test_chats_are_evaluated(self):
        found = self.evaluate("local-chat-completions", "/v1/chat/completions", self.tasks[1:], apply_chat_template=True)
        self.assertEqual(len(found["samples"]["tell"]), len(QUERIES))


if __name__ == "__main__":
    unittest.main()
