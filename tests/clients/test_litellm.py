"""LiteLLM, unchanged, against a running server, by the providers that people use for servers of their own.

`scripts/serve-clients` starts the server and runs this with its address in SERVER.
"""

import json
import os
import unittest
import warnings

# Of pydantic, about litellm's own types.
warnings.simplefilter("ignore")
os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"
import litellm  # noqa: E402

SERVER = os.environ["SERVER"]
KEY = "a key"
MESSAGES = [{"role": "user", "content": "Once upon a time there was a dragon."}]
SCHEMA = {
    "type": "object",
    "properties": {"day": {"type": "integer", "minimum": 1, "maximum": 7}},
    "required": ["day"],
    "additionalProperties": False,
}
TOOL = {"type": "function", "function": {"name": "sun", "description": "Whether it shines.", "parameters": SCHEMA}}
OPENAI = {"api_base": f"{SERVER}/v1", "api_key": KEY}
ROOT = {"api_base": SERVER, "api_key": KEY}
PROVIDERS = {"openai": OPENAI, "hosted_vllm": OPENAI, "ollama_chat": ROOT, "anthropic": ROOT}

litellm.suppress_debug_info = True


def chat(provider, **options):
    """A completion, as litellm's users write it."""
    address = PROVIDERS[provider]
    return litellm.completion(model=f"{provider}/story", messages=MESSAGES, num_retries=0, **address, **options)


class LiteLLM(unittest.TestCase):
    def test_providers_give_the_same_text_whole_and_streamed(self):
        texts = set()
        for provider in PROVIDERS:
            with self.subTest(provider):
                asked = dict(max_tokens=12, temperature=0)
                whole = chat(provider, **asked)
                parts = chat(provider, **asked, stream=True, stream_options={"include_usage": True})
                streamed = "".join(part.choices[0].delta.content or "" for part in parts if part.choices)
                self.assertEqual(whole.choices[0].message.content, streamed)
                self.assertEqual((whole.choices[0].finish_reason, whole.usage.completion_tokens), ("length", 12))
                texts.add(streamed)
        self.assertEqual(len(texts), 1, texts)

    def test_tools_are_called(self):
        one = {"parallel_tool_calls": False}
        for provider, more in [("openai", {"reasoning_effort": "none", **one}), ("anthropic", one)]:
            with self.subTest(provider):
                (call,) = chat(provider, tools=[TOOL], tool_choice="required", max_tokens=200, **more).choices[0].message.tool_calls
                self.assertIn(json.loads(call.function.arguments)["day"], range(1, 8))

    def test_answers_follow_a_schema(self):
        wanted = {"type": "json_schema", "json_schema": {"name": "sun", "schema": SCHEMA, "strict": True}}
        for provider in ("openai", "hosted_vllm", "ollama_chat"):
            with self.subTest(provider):
                answer = chat(provider, response_format=wanted, max_tokens=200, temperature=0).choices[0].message.content
                self.assertIn(json.loads(answer)["day"], range(1, 8))

    def test_texts_continue(self):
        asked = dict(prompt="Once upon a", max_tokens=8, temperature=0)
        for provider in ("text-completion-openai", "hosted_vllm"):
            with self.subTest(provider):
                model = f"{provider}/story"
                whole = litellm.text_completion(model=model, **asked, **OPENAI).choices[0].text
                parts = litellm.text_completion(model=model, **asked, **OPENAI, stream=True)
                self.assertEqual(whole, "".join(part.choices[0].text or "" for part in parts))
                echoed = litellm.text_completion(model=model, **asked, **OPENAI, echo=True, logprobs=1).choices[0]
                self.assertEqual(echoed.text, f"Once upon a{whole}")
                self.assertIsNone(echoed.logprobs.token_logprobs[0])

    def test_embeddings_are_equal(self):
        vectors = []
        for provider, address in [("openai", OPENAI), ("hosted_vllm", OPENAI), ("ollama", ROOT)]:
            answer = litellm.embedding(model=f"{provider}/nomic", input=["a dragon", "the sun"], **address)
            vectors.append([item["embedding"] for item in answer.data])
        self.assertEqual(len(vectors[0]), 2)
        for others in vectors[1:]:
            for own, other in zip(vectors[0], others):
                self.assertTrue(all(abs(a - b) < 1e-6 for a, b in zip(own, other)))

    def test_documents_are_ranked(self):
        asked = dict(query="a dragon", documents=["the sun", "a dragon", "rain"], top_n=2)
        addresses = {"hosted_vllm": f"{SERVER}/v1", "cohere": f"{SERVER}/v2/rerank", "jina_ai": f"{SERVER}/v1/rerank"}
        orders = set()
        for provider, address in addresses.items():
            answer = litellm.rerank(model=f"{provider}/bert", api_base=address, api_key=KEY, **asked)
            orders.add(tuple(result["index"] for result in answer.results))
        self.assertEqual({len(order) for order in orders}, {2})
        self.assertEqual(len(orders), 1, orders)


if __name__ == "__main__":
    unittest.main()
