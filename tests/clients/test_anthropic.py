"""Anthropic's official Python client, unchanged, against a running server.

`scripts/serve-clients` starts the server and runs this with its address in SERVER.
"""

import os
import unittest

import anthropic
from pydantic import BaseModel

SERVER = os.environ["SERVER"]
KEY = "a key"
MESSAGES = [{"role": "user", "content": "Once upon a time there was a dragon."}]
SCHEMA = {
    "type": "object",
    "properties": {"day": {"type": "integer", "minimum": 1, "maximum": 7}, "place": {"enum": ["Rome", "Oslo"]}},
    "required": ["day", "place"],
    "additionalProperties": False,
}
TOOL = {"name": "sun", "description": "Whether it shines.", "input_schema": SCHEMA}


class Place(BaseModel):
    """Answers whose texts are short."""

    sunny: bool


class Messages(unittest.TestCase):
    def setUp(self):
        self.client = anthropic.Anthropic(base_url=SERVER, api_key=KEY, max_retries=0)
        self.addCleanup(self.client.close)

    def test_whole_and_streamed(self):
        asked = dict(model="story", messages=MESSAGES, system=[{"type": "text", "text": "Tell."}], max_tokens=12, extra_body={"temperature": 0})
        whole = self.client.messages.create(**asked, metadata={"user_id": "x"})
        self.assertEqual((whole.stop_reason, whole.usage.output_tokens), ("max_tokens", 12))
        with self.client.messages.stream(**asked) as stream:
            text = "".join(stream.text_stream)
            final = stream.get_final_message()
        self.assertEqual([text, final.content[0].text], [whole.content[0].text] * 2)
        self.assertEqual((final.stop_reason, final.usage.output_tokens), ("max_tokens", 12))
        counted = self.client.messages.count_tokens(**{key: asked[key] for key in ("model", "messages", "system")})
        self.assertEqual(counted.input_tokens, whole.usage.input_tokens + whole.usage.cache_read_input_tokens)
        stop = whole.content[0].text[10:14]
        stopped = self.client.messages.create(**asked, stop_sequences=[stop])
        self.assertEqual((stopped.stop_reason, stopped.stop_sequence), ("stop_sequence", stop))

    def test_tools(self):
        asked = dict(model="story", tools=[TOOL], max_tokens=200, thinking={"type": "disabled"}, extra_body={"seed": 3})
        choice = {"type": "any", "disable_parallel_tool_use": True}
        with self.client.messages.stream(**asked, messages=MESSAGES, tool_choice=choice) as stream:
            answer = stream.get_final_message()
        self.assertEqual(answer.stop_reason, "tool_use")
        call = answer.content[-1]
        self.assertTrue(1 <= call.input["day"] <= 7 and call.input["place"] in ("Rome", "Oslo"), call)
        result = {"type": "tool_result", "tool_use_id": call.id, "content": "It does."}
        messages = [*MESSAGES, {"role": "assistant", "content": answer.content}, {"role": "user", "content": [result]}]
        after = self.client.messages.create(**asked, messages=messages, tool_choice={"type": "none"})
        self.assertTrue(all(block.type == "text" for block in after.content))
        beta = self.client.beta.messages.create(**asked, messages=MESSAGES, betas=["context-1m-2025-08-07"], tool_choice=choice)
        self.assertEqual(beta.stop_reason, "tool_use")

    def test_schemas_and_models(self):
        parsed = self.client.messages.parse(model="story", messages=MESSAGES, max_tokens=200, output_format=Place, extra_body={"seed": 3})
        self.assertIsInstance(parsed.parsed_output, Place)
        self.assertEqual([model.id for model in self.client.models.list()], ["story", "nomic", "bert", "pictures", "whisper"])
        self.assertEqual(self.client.models.retrieve("story").display_name, "story")

    def test_errors_have_their_classes(self):
        create = self.client.messages.create
        with self.assertRaises(anthropic.NotFoundError) as refused:
            create(model="claude-unknown", messages=MESSAGES, max_tokens=1)
        self.assertEqual(refused.exception.body["error"]["type"], "not_found_error")
        self.assertTrue(refused.exception.request_id)
        with self.assertRaises(anthropic.BadRequestError):
            create(model="story", messages=[{"role": "user", "content": "a story " * 900}], max_tokens=1)
        image = {"type": "image", "source": {"type": "url", "url": "https://example.org/a.png"}}
        with self.assertRaises(anthropic.BadRequestError) as refused:
            create(model="story", messages=[{"role": "user", "content": [image]}], max_tokens=1, stream=True)
        self.assertIn("messages[0].content[0]", str(refused.exception))
        with self.assertRaises(anthropic.AuthenticationError):
            anthropic.Anthropic(base_url=SERVER, api_key="wrong", max_retries=0).models.list()

    def test_bearer_token(self):
        client = anthropic.Anthropic(base_url=SERVER, auth_token=KEY, max_retries=0)
        self.assertTrue(client.messages.create(model="story", messages=MESSAGES, max_tokens=1).id.startswith("msg_"))


if __name__ == "__main__":
    unittest.main()
