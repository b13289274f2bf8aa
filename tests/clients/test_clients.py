"""The official Python clients of OpenAI, Ollama and LangChain, unchanged, against a running server, and Prometheus's own parser.

`scripts/serve-clients` starts the server and runs this with its address in SERVER.
"""

import json
import os
import unittest
import urllib.request
from array import array

import httpx
import ollama
import openai
from langchain_core.messages import HumanMessage
from langchain_core.tools import tool
from langchain_ollama import ChatOllama, OllamaEmbeddings
from langchain_openai import ChatOpenAI, OpenAIEmbeddings
from prometheus_client.openmetrics.parser import text_string_to_metric_families
from pydantic import BaseModel, Field

SERVER = os.environ["SERVER"]
KEY = "a key"
MESSAGES = [{"role": "user", "content": "Once upon a time there was a dragon."}]
PLACE = {
    "type": "object",
    "properties": {"day": {"type": "integer", "minimum": 1, "maximum": 7}, "place": {"enum": ["Rome", "Oslo"]}},
    "required": ["day", "place"],
    "additionalProperties": False,
}
TOOL = {"type": "function", "function": {"name": "sun", "description": "Whether it shines.", "parameters": PLACE}}


class Place(BaseModel):
    """A day and a place."""

    day: int = Field(ge=1, le=7)
    place: str = Field(pattern="^(Rome|Oslo)$")


def fits(arguments):
    return 1 <= arguments["day"] <= 7 and arguments["place"] in ("Rome", "Oslo")


class OpenAI(unittest.TestCase):
    def setUp(self):
        self.client = openai.OpenAI(base_url=f"{SERVER}/v1", api_key=KEY, max_retries=0)
        self.addCleanup(self.client.close)

    def test_chats_whole_and_streamed(self):
        asked = dict(model="story", messages=MESSAGES, max_tokens=12, seed=7, n=2, logprobs=True, top_logprobs=2)
        whole = self.client.chat.completions.create(**asked)
        texts = ["", ""]
        stream = self.client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True})
        for chunk in stream:
            for choice in chunk.choices:
                texts[choice.index] += choice.delta.content or ""
        self.assertEqual(texts, [choice.message.content for choice in whole.choices])
        self.assertEqual(chunk.usage.total_tokens, whole.usage.total_tokens)
        self.assertEqual(len(whole.choices[0].logprobs.content[0].top_logprobs), 2)
        self.assertEqual(whole.choices[0].finish_reason, "length")

    def test_tools_and_schemas(self):
        asked = dict(model="story", messages=MESSAGES, seed=3, max_tokens=200, reasoning_effort="none")
        answer = self.client.chat.completions.create(**asked, tools=[TOOL], tool_choice="required", parallel_tool_calls=False)
        [call] = answer.choices[0].message.tool_calls
        self.assertTrue(fits(json.loads(call.function.arguments)))
        result = {"role": "tool", "tool_call_id": call.id, "content": "It does."}
        after = self.client.chat.completions.create(**{**asked, "messages": [*MESSAGES, answer.choices[0].message, result]}, tools=[TOOL], tool_choice="none")
        self.assertIsNone(after.choices[0].message.tool_calls)
        parsed = self.client.chat.completions.parse(**asked, response_format=Place)
        self.assertIsInstance(parsed.choices[0].message.parsed, Place)
        with self.client.chat.completions.stream(**asked, response_format=Place) as stream:
            self.assertIsInstance(stream.get_final_completion().choices[0].message.parsed, Place)

    def test_responses(self):
        asked = dict(model="story", input=MESSAGES, max_output_tokens=12, temperature=0)
        whole = self.client.responses.create(**asked)
        with self.client.responses.stream(**asked) as stream:
            events = list(stream)
        deltas = "".join(event.delta for event in events if event.type == "response.output_text.delta")
        # The client's own `get_final_response` wants one that was not cut off.
        final = events[-1].response
        self.assertEqual((deltas, final.output_text), (whole.output_text, whole.output_text))
        self.assertEqual((final.status, final.usage.output_tokens), ("incomplete", 12))
        asked = dict(model="story", input="A dragon", reasoning={"effort": "none"}, text_format=Place)
        with self.client.responses.stream(**asked) as stream:
            self.assertIsInstance(stream.get_final_response().output_parsed, Place)
        parsed = self.client.responses.parse(model="story", input="A dragon", reasoning={"effort": "none"}, text_format=Place)
        self.assertIsInstance(parsed.output_parsed, Place)
        tools = [{"type": "function", **TOOL["function"], "strict": True}]
        # Of calls without end none would be whole.
        called = self.client.responses.create(model="story", input="A dragon", tools=tools, tool_choice="required", parallel_tool_calls=False, reasoning={"effort": "none"})
        self.assertTrue(fits(json.loads(called.output[0].arguments)))

    def test_texts_vectors_and_models(self):
        text = self.client.completions.create(model="story", prompt=["Once", "Twice"], max_tokens=4, logprobs=1, echo=False)
        self.assertEqual([choice.index for choice in text.choices], [0, 1])
        # The client asks for base64 by itself.
        vectors = self.client.embeddings.create(model="nomic", input=["a dragon", "the sun"])
        plain = self.client.embeddings.create(model="nomic", input="the sun", encoding_format="float")
        # Text and base64 state the same 32-bit numbers.
        self.assertEqual(array("f", vectors.data[1].embedding), array("f", plain.data[0].embedding))
        self.assertEqual([model.id for model in self.client.models.list()], ["story", "nomic", "bert", "pictures", "whisper"])
        self.assertEqual(self.client.models.retrieve("nomic").id, "nomic")

    def test_errors_have_their_classes(self):
        create = self.client.chat.completions.create
        with self.assertRaises(openai.BadRequestError) as refused:
            create(model="story", messages=MESSAGES, temperature=9)
        self.assertEqual((refused.exception.param, refused.exception.code), ("temperature", "invalid_value"))
        with self.assertRaises(openai.BadRequestError) as refused:
            create(model="story", messages=[{"role": "user", "content": "a story " * 900}])
        self.assertEqual(refused.exception.code, "context_length_exceeded")
        with self.assertRaises(openai.NotFoundError):
            create(model="none", messages=MESSAGES, stream=True)
        with self.assertRaises(openai.AuthenticationError):
            openai.OpenAI(base_url=f"{SERVER}/v1", api_key="wrong").models.list()
        with self.assertRaises(openai.PermissionDeniedError):
            openai.OpenAI(base_url=f"{SERVER}/v1", api_key=KEY, default_headers={"origin": "http://evil.example"}).models.list()

    def test_a_stream_that_is_left(self):
        stream = self.client.chat.completions.create(model="story", messages=MESSAGES, max_tokens=400, stream=True)
        next(stream)
        stream.close()
        self.client.chat.completions.create(model="story", messages=MESSAGES, max_tokens=1)


class Ollama(unittest.TestCase):
    def setUp(self):
        self.client = ollama.Client(host=SERVER, headers={"authorization": f"Bearer {KEY}"})

    def test_chats_and_texts(self):
        options = {"temperature": 0, "num_predict": 12}
        whole = self.client.chat(model="story", messages=MESSAGES, options=options)
        stream = self.client.chat(model="story", messages=MESSAGES, options=options, stream=True)
        parts = list(stream)
        self.assertEqual("".join(part.message.content for part in parts), whole.message.content)
        self.assertEqual((parts[-1].done_reason, parts[-1].eval_count), ("length", 12))
        text = self.client.generate(model="story", prompt="Once", raw=True, options=options)
        self.assertTrue(text.response and text.done)
        formed = self.client.chat(model="story", messages=MESSAGES, format=PLACE, options={"seed": 1})
        self.assertTrue(fits(json.loads(formed.message.content)))
        # What a tool gave, in this client's own words.
        call = {"function": {"name": "sun", "arguments": {"day": 1, "place": "Rome"}}}
        conversation = [*MESSAGES, {"role": "assistant", "content": "", "tool_calls": [call]}, {"role": "tool", "tool_name": "sun", "content": "Yes."}]
        self.assertTrue(self.client.chat(model="story", messages=conversation, tools=[TOOL], options=options).done)
        self.assertTrue(self.client.generate(model="story", prompt="", keep_alive=-1).done)
        scored = self.client.generate(model="story", prompt="Once", options=options, logprobs=True, top_logprobs=2)
        self.assertEqual([len(token.top_logprobs) for token in scored.logprobs], [2] * 12)
        after = self.client.generate(model="story", prompt="Twice", context=scored.context, options=options)
        self.assertGreater(after.prompt_eval_count, len(scored.context))

    def test_vectors_and_models(self):
        self.assertEqual(len(self.client.embed(model="nomic", input=["a", "b"]).embeddings), 2)
        self.assertEqual([model.model for model in self.client.list().models], ["story", "nomic", "bert", "pictures", "whisper"])
        self.assertIn("completion", self.client.show("story").capabilities)
        self.assertEqual({model.model for model in self.client.ps().models}, {"story", "nomic", "bert", "pictures", "whisper"})
        [vector] = self.client.embed(model="nomic", input="a").embeddings
        self.assertEqual(self.client.embeddings(model="nomic", prompt="a").embedding, vector)
        self.assertEqual(len(self.client.embed(model="nomic", input="a", dimensions=8).embeddings[0]), 8)

    def test_models_are_pulled_named_and_deleted(self):
        model = "hf.co/owner/name:Q8_0"
        parts = list(self.client.pull(model, stream=True))
        self.assertEqual((parts[0].status, parts[-1].status), ("pulling manifest", "success"))
        self.assertEqual(parts[-4].completed, parts[-4].total)
        self.assertEqual(self.client.pull(model).status, "success")
        self.assertEqual(self.client.copy(model, "a-tale").status, "success")
        self.assertEqual([model.model for model in self.client.list().models][-2:], [model, "a-tale"])
        self.assertTrue(self.client.generate(model="a-tale", prompt="Once", raw=True, options={"num_predict": 3}).done)
        self.assertEqual([self.client.delete(name).status for name in ("a-tale", model)], ["success"] * 2)
        for refused in (lambda: self.client.create("x", from_="story"), lambda: self.client.push("story"), lambda: self.client.delete("story")):
            self.assertRaises(ollama.ResponseError, refused)

    def test_errors(self):
        with self.assertRaises(ollama.ResponseError) as refused:
            self.client.chat(model="none", messages=MESSAGES)
        self.assertEqual(refused.exception.status_code, 404)
        with self.assertRaises(ollama.ResponseError) as refused:
            list(self.client.chat(model="story", messages=MESSAGES, options={"temperature": -1}, stream=True))
        self.assertEqual(refused.exception.status_code, 400)


class LangChain(unittest.TestCase):
    def chat(self, **more):
        return ChatOpenAI(base_url=f"{SERVER}/v1", api_key=KEY, model="story", max_tokens=200, max_retries=0, **more)

    def test_chats(self):
        chat = self.chat(temperature=0).bind(max_tokens=12)
        messages = [HumanMessage(MESSAGES[0]["content"])]
        whole = chat.invoke(messages)
        self.assertEqual("".join(part.content for part in chat.stream(messages)), whole.content)
        self.assertEqual(whole.usage_metadata["output_tokens"], 12)

    def test_tools_and_schemas(self):
        @tool
        def sun(day: int) -> str:
            """Whether it shines on a day."""
            return f"Yes, on day {day}."

        chat = self.chat(seed=3, reasoning_effort="none")
        [call] = chat.bind_tools([sun], tool_choice="sun", parallel_tool_calls=False).invoke("A dragon").tool_calls
        self.assertTrue(sun.invoke(call).content.startswith("Yes"))
        self.assertIsInstance(chat.with_structured_output(Place).invoke("A dragon"), Place)

    def test_responses(self):
        chat = self.chat(temperature=0, use_responses_api=True)
        whole = chat.invoke("A dragon")
        self.assertTrue(whole.text)
        self.assertEqual("".join(part.text for part in chat.stream("A dragon")), whole.text)

    def test_vectors(self):
        vectors = OpenAIEmbeddings(base_url=f"{SERVER}/v1", api_key=KEY, model="nomic", check_embedding_ctx_length=False)
        self.assertEqual(len(vectors.embed_documents(["a", "b"])), 2)


class LangChainOllama(unittest.TestCase):
    def setUp(self):
        self.more = dict(base_url=SERVER, client_kwargs={"headers": {"authorization": f"Bearer {KEY}"}})

    def test_chats(self):
        chat = ChatOllama(model="story", temperature=0, num_predict=12, num_ctx=4096, validate_model_on_init=True, **self.more)
        whole = chat.invoke("A dragon")
        self.assertEqual("".join(part.content for part in chat.stream("A dragon")), whole.content)
        self.assertEqual(whole.usage_metadata["output_tokens"], 12)
        formed = ChatOllama(model="story", seed=3, reasoning=False, **self.more).with_structured_output(Place)
        self.assertIsInstance(formed.invoke("A dragon"), Place)

    def test_vectors(self):
        self.assertEqual(len(OllamaEmbeddings(model="nomic", **self.more).embed_documents(["a", "b"])), 2)


class Others(unittest.TestCase):
    def test_measures_are_read_by_prometheus(self):
        request = urllib.request.Request(f"{SERVER}/metrics", headers={"authorization": f"Bearer {KEY}"})
        text = urllib.request.urlopen(request).read().decode()
        families = {family.name: family for family in text_string_to_metric_families(text)}
        self.assertEqual(families["tilewright_time_to_first_token_seconds"].type, "histogram")
        loaded = {sample.labels["model"]: sample.value for sample in families["tilewright_model_loaded"].samples}
        self.assertEqual(loaded, {"story": 1, "nomic": 1, "bert": 1, "pictures": 1, "whisper": 1})

    def test_documents_are_ranked(self):
        asked = {"model": "bert", "query": "sun", "documents": ["a dragon", "the sun"], "top_n": 1}
        answer = httpx.post(f"{SERVER}/v1/rerank", json=asked, headers={"authorization": f"Bearer {KEY}"}).json()
        self.assertEqual(len(answer["results"]), 1)


if __name__ == "__main__":
    unittest.main()
