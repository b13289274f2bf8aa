"""Pictures through the official Python clients of OpenAI, Ollama, Anthropic and LangChain, unchanged, against a running server:
each gets the same answer to the same picture.

`scripts/serve-clients` starts the server and runs this with its address in SERVER.
"""

import base64
import os
import unittest
from pathlib import Path

import anthropic
import ollama
import openai
from langchain_core.messages import HumanMessage
from langchain_ollama import ChatOllama
from langchain_openai import ChatOpenAI

SERVER = os.environ["SERVER"]
KEY = "a key"
PICTURES = Path(__file__).parents[1] / "data/pictures"
PICTURE = (PICTURES / "a.png").read_bytes()
ENCODED = base64.b64encode(PICTURE).decode()
URL = f"data:image/png;base64,{ENCODED}"
N = 12
PARTS = [{"type": "image_url", "image_url": {"url": URL}}, {"type": "text", "text": "What is it?"}]


class Pictures(unittest.TestCase):
    def setUp(self):
        self.openai = openai.OpenAI(base_url=f"{SERVER}/v1", api_key=KEY, max_retries=0)
        self.addCleanup(self.openai.close)
        self.asked = dict(model="pictures", max_tokens=N, temperature=0, extra_body={"ignore_eos": True})

    def answer(self, parts):
        choice = self.openai.chat.completions.create(messages=[{"role": "user", "content": parts}], **self.asked).choices[0]
        return choice.message.content

    def test_openai(self):
        whole = self.answer(PARTS)
        self.assertNotEqual(whole, self.answer(PARTS[1:]))
        self.assertNotEqual(whole, self.answer([{"type": "image_url", "image_url": {"url": URL, "detail": "low"}}, *PARTS]))
        stream = self.openai.chat.completions.create(messages=[{"role": "user", "content": PARTS}], stream=True, **self.asked)
        self.assertEqual("".join(chunk.choices[0].delta.content or "" for chunk in stream), whole)
        content = [{"type": "input_image", "image_url": URL, "detail": "auto"}, {"type": "input_text", "text": "What is it?"}]
        response = self.openai.responses.create(
            model="pictures",
            input=[{"role": "user", "content": content}],
            max_output_tokens=N,
            temperature=0,
            extra_body={"ignore_eos": True},
        )
        self.assertEqual(response.output_text, whole)

    def test_openai_errors(self):
        for url in ["https://example.org/a.png", "data:image/svg+xml;base64,PHN2Zy8+", "data:image/png;base64,AAAA"]:
            with self.assertRaises(openai.BadRequestError) as refused:
                self.answer([{"type": "image_url", "image_url": {"url": url}}])
            self.assertIn("messages[0].content[0]", str(refused.exception))
        with self.assertRaises(openai.BadRequestError):
            self.openai.chat.completions.create(model="story", messages=[{"role": "user", "content": PARTS}], max_tokens=1)

    def test_ollama(self):
        client = ollama.Client(host=SERVER, headers={"authorization": f"Bearer {KEY}"})
        message = {"role": "user", "content": "What is it?", "images": [PICTURE]}
        options = {"temperature": 0, "num_predict": N}
        answer = client.chat(model="pictures", messages=[message], options=options).message.content
        self.assertTrue(self.answer(PARTS).startswith(answer) and answer)
        by_path = {**message, "images": [str(PICTURES / "a.png")]}
        self.assertEqual(client.chat(model="pictures", messages=[by_path], options=options).message.content, answer)
        self.assertIn("vision", client.show("pictures").capabilities)

    def test_anthropic(self):
        client = anthropic.Anthropic(base_url=SERVER, api_key=KEY, max_retries=0)
        self.addCleanup(client.close)
        source = {"type": "base64", "media_type": "image/png", "data": ENCODED}
        content = [{"type": "image", "source": source}, {"type": "text", "text": "What is it?"}]
        message = client.messages.create(
            model="pictures",
            messages=[{"role": "user", "content": content}],
            max_tokens=N,
            extra_body={"temperature": 0},
        )
        answer = message.content[0].text
        self.assertTrue(self.answer(PARTS).startswith(answer) and answer)

    def test_langchain(self):
        message = HumanMessage(content=PARTS)
        chat = ChatOpenAI(model="pictures", base_url=f"{SERVER}/v1", api_key=KEY, max_tokens=N, temperature=0, extra_body={"ignore_eos": True})
        self.assertEqual(chat.invoke([message]).content, self.answer(PARTS))
        headers = {"headers": {"authorization": f"Bearer {KEY}"}}
        chat = ChatOllama(model="pictures", base_url=SERVER, temperature=0, num_predict=N, client_kwargs=headers)
        answer = chat.invoke([message]).content
        # It puts a line end before the text.
        whole = self.answer([PARTS[0], {"type": "text", "text": "\nWhat is it?"}])
        self.assertTrue(whole.startswith(answer) and answer)


if __name__ == "__main__":
    unittest.main()
