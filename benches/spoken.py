"""Sentences that benches of speech have spoken, and the words that are wrong in what was heard."""
import re

SENTENCES = [
    "The museum opens at nine in the morning and closes at six in the evening.",
    "Please leave your bags at the entrance and keep your ticket with you.",
    "In the first room you will find paintings from the eighteenth century.",
    "The old bridge crosses the river near the mill.",
    "She bought apples, bread and a bottle of milk at the market.",
    "We could not see the top of the mountain because of the clouds.",
    "The train to the coast leaves from the second platform.",
    "Nobody remembered who had planted the tree behind the school.",
    "He wrote a long letter to his sister and forgot to send it.",
    "Can you tell me where the nearest station is?",
    "The children built a small boat out of paper and wood.",
    "After the storm, the streets were full of leaves and branches.",
    "My neighbour plays the piano every evening after dinner.",
    "The doctor asked him to rest for a few days.",
    "A cold wind was blowing from the north when they arrived.",
    "There is a library on the upper floor, next to the garden.",
    "The farmer sold his horses and moved to the city.",
    "If it rains tomorrow, we will stay at home and read.",
    "The quick brown fox jumps over the lazy dog.",
    "Most of the windows were broken, but the roof was still good.",
]


def plain(text):
    return re.sub(r"[^a-z' ]", "", text.lower().replace("-", " ")).split()


def errors(found, want):
    """Words to insert, delete or replace."""
    row = list(range(len(want) + 1))
    for i, word in enumerate(found, 1):
        above, row[0] = row[0], i
        for j, other in enumerate(want, 1):
            above, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, above + (word != other))
    return row[-1]
