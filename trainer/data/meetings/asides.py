"""Small talk: short exchanges that add nothing to the minutes.

Turns alternate between two or three speakers. Every third exchange is for validation.
"""

ASIDES: tuple[tuple[str, ...], ...] = (
    ("Is that window open? I'm freezing.", "Hang on, I'll shut it.", "Thanks."),
    ("Sorry I'm late, the bus just didn't come.", "No problem, we've only just started."),
    ("You're on mute.", "Oh. Better?", "Better."),
    (
        "Does anybody else hear that humming?",
        "It's the projector. It does that.",
        "It didn't use to.",
    ),
    ("Who brought the cake?", "Me, it's left over from my sister's birthday.", "Tell her thanks."),
    ("Can somebody lend me a pen?", "Blue or black?", "Anything that writes."),
    ("Is that your dog barking?", "The neighbour's. He does it whenever the post comes."),
    (
        "I've got to move the car at eleven, just so you know.",
        "Then we'll go on without you for two minutes.",
    ),
    ("My screen's frozen, go on without me.", "We can still see your slide.", "How nice for you."),
    ("How's the new flat?", "Full of boxes. Ask me again in June.", "Will do."),
    ("Are those the new chairs?", "They are. Don't lean back too far.", "Too late."),
    ("Did you see the match last night?", "Please, don't, I recorded it."),
    ("It's raining again.", "It's been raining for a week.", "At least the garden's happy."),
    ("What time's the train?", "Ten to. I've still got half an hour."),
    ("Sorry, that was my phone.", "Was it important?", "My mother. So yes, but not now."),
    ("Has anybody got a charger?", "What kind?", "The old kind, of course."),
    ("The coffee tastes funny.", "They've changed the brand.", "To what, gravel?"),
    ("Could we turn the light on?", "It's broken, I've told them twice.", "Then I'll squint."),
    ("Congratulations, by the way. I heard it's a girl!", "Yes, on Sunday. Nobody's slept since."),
    ("You've got flour on your sleeve.", "That's chalk.", "Ah."),
    ("Is there any water left?", "Behind you.", "I'm blind, thank you."),
    ("Is my camera on?", "Yes, and we can see the cat.", "She's staying."),
    ("Whose umbrella's that?", "It's been there since March.", "Then it's mine."),
    ("Can you repeat that? A lorry went past.", "It wasn't important, I only agreed with you."),
    ("Sorry, I was miles away. Where are we?", "Still on the same point.", "Good."),
    ("When did it get so late?", "It's the clock, it's ten minutes fast.", "Every time."),
    ("Who keeps turning the heating up?", "Not me.", "It's always nobody."),
)
