"""Write answers.jsonl: an answer of a shop's support agent to each of 140 complaints.

    python -m examples.shop.make_answers

The answers are written for this example: two sentences each, drawn from those below.
"""

from __future__ import annotations

import json
import random
from pathlib import Path

OUT = Path(__file__).parent / "answers.jsonl"
SYSTEM = (
    "You are a friendly support agent of an online shop. Reply to the customer in one or two "
    "sentences."
)
PRODUCTS = """
    kettle, coffee grinder, desk lamp, winter jacket, backpack, bookshelf, phone case, yoga mat,
    garden hose, alarm clock, frying pan, office chair, wool blanket, toaster
"""
ANSWERS: dict[str, tuple[list[str], list[str]]] = {
    "The {} arrived broken.": (
        [
            "I'm sorry that your {} arrived broken.",
            "I'm very sorry about the broken {}.",
            "That should not have happened: I'm sorry that the {} was damaged on its way to you.",
        ],
        [
            "A new one leaves our warehouse tomorrow, and you can keep the broken one.",
            "I have ordered a replacement, which will be with you in three days.",
            "Please send us a photo of it, and we will send you a new one for free.",
        ],
    ),
    "My {} has not arrived, although it should have come last week.": (
        [
            "I'm sorry that your {} is late.",
            "I'm sorry that you are still waiting for your {}.",
            "A week is too long to wait for a {}, and I'm sorry about that.",
        ],
        [
            "I have asked the carrier where it is, and will write to you tomorrow.",
            "If it is not there by Friday, we will send you a new one for free.",
            "I have found the parcel, and it will be with you in two days.",
        ],
    ),
    "You sent me the wrong colour of the {}.": (
        [
            "I'm sorry that we sent you the wrong colour of the {}.",
            "I'm sorry, we mixed up the colour of your {}.",
            "That was our mistake, and I'm sorry that your {} has the wrong colour.",
        ],
        [
            "The right one leaves our warehouse today, and the return is free.",
            "I have ordered the right colour for you, and you can send this one back for free.",
            "You can keep it for half the price, or swap it for the right one for free.",
        ],
    ),
    "The {} stopped working after three days.": (
        [
            "I'm sorry that your {} stopped working so soon.",
            "A {} should last for years, and I'm sorry that yours did not.",
            "I'm sorry about the trouble with your {}.",
        ],
        [
            "It has a two-year warranty, so we will send you a new one for free.",
            "We will replace it or refund it, whichever you prefer.",
            "I have emailed you a label to return it, and a new one is on its way.",
        ],
    ),
    "I was charged twice for the {}.": (
        [
            "I'm sorry that you were charged twice for the {}.",
            "I'm sorry about the second charge for your {}.",
            "That was our mistake: I'm sorry that you paid twice for the {}.",
        ],
        [
            "I have refunded one payment, and the money will be back in three days.",
            "One of the two payments goes back to your card today.",
            "We have cancelled one payment, and you will get an email about it today.",
        ],
    ),
    "I returned the {} three weeks ago and still have no refund.": (
        [
            "I'm sorry that you are still waiting for the refund of your {}.",
            "I'm sorry that the refund of the {} takes so long.",
            "Three weeks is too long, and I'm sorry about the late refund of your {}.",
        ],
        [
            "I have sent the money today, and it will reach you in two days.",
            "We have received your parcel, and I have just released the refund.",
            "You will have the money by Friday, and ten percent off your next order.",
        ],
    ),
    "The {} is much smaller than in the picture.": (
        [
            "I'm sorry that the {} is smaller than you expected.",
            "I'm sorry that our picture of the {} was misleading.",
            "I understand that a small {} is not what you wanted, and I'm sorry.",
        ],
        [
            "You can return it for free, and we will refund it.",
            "We can swap it for the larger one, and the return is free.",
            "I have emailed you a label to return it, and you will get your money back.",
        ],
    ),
    "A part of the {} is missing in the box.": (
        [
            "I'm sorry that a part of your {} is missing.",
            "I'm sorry that your {} came without one of its parts.",
            "We should have checked the box of your {}, and I'm sorry that we did not.",
        ],
        [
            "Please tell us which part it is, and we will send it to you today.",
            "The missing part leaves our warehouse tomorrow, free of charge.",
            "We will send you the part for free, or a full refund if you prefer.",
        ],
    ),
    "The parcel with the {} was left in the rain.": (
        [
            "I'm sorry that your {} was left in the rain.",
            "I'm sorry that the carrier left your {} outside.",
            "The carrier should not have left your {} in the rain, and I'm sorry.",
        ],
        [
            "If it is damaged, we will send you a new one for free.",
            "I have ordered a dry one for you, which will arrive in three days.",
            "Please send us a photo, and we will replace it or refund it.",
        ],
    ),
    "I ordered one {} and got two, and you charged me for both.": (
        [
            "I'm sorry that we sent and charged you a second {}.",
            "I'm sorry about the second {} on your bill.",
            "That was our mistake, and I'm sorry that you paid for two of the {}.",
        ],
        [
            "I have refunded one of them, and you can send it back for free.",
            "Keep both, we have refunded the second one today.",
            "We will pick up the second one, and the money is on its way to you.",
        ],
    ),
}


def main() -> None:
    drawn = random.Random(0)
    with OUT.open("w", encoding="utf-8") as file:
        for product in PRODUCTS.split(","):
            for problem, sentences in ANSWERS.items():
                answer = " ".join(drawn.choice(choices) for choices in sentences)
                prompt = [
                    {"role": "system", "content": SYSTEM},
                    {
                        "role": "user",
                        "content": f"{problem.format(product.strip())} Can you help?",
                    },
                ]
                row = {"prompt": prompt, "completion": answer.format(product.strip())}
                file.write(json.dumps(row, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
