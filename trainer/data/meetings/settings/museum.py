"""A small museum."""

from trainer.data.meetings.issue import Issue, MeetingSetting, Option

MUSEUM = MeetingSetting(
    "museum",
    (
        "Curators' meeting",
        "Exhibition planning",
        "House meeting of the museum",
        "Monthly meeting, museum and archive",
        "Preparations for the autumn exhibition",
        "Museum round",
    ),
    ("director", "curator", "conservator", "educator", "head of security", "press officer"),
    (
        Issue(
            "the loan of the harbour painting",
            "the lender wants the painting back two weeks early",
            "The owner of the harbour painting has written. She'd like it back two weeks before the"
            " exhibition closes, because her daughter's getting married in front of it.",
            (
                (
                    "What does the loan agreement say?",
                    "It says the thirtieth, so she's asking for a favour.",
                ),
                (
                    "How much does the exhibition depend on it?",
                    "It's on the poster and on {tickets} printed tickets.",
                ),
            ),
            (
                Option(
                    "give the painting back early and show a facsimile",
                    "the lender has two more paintings that the museum would like one day",
                    "visitors who come for the original will be cross",
                    ("commission the facsimile", "book the art courier for the earlier date"),
                ),
                Option(
                    "keep to the agreement and offer her the museum for the wedding",
                    "the wedding would be in front of the painting all the same",
                    "a hundred guests with wine in the main gallery worry the insurer",
                    ("ask the insurer about the wedding", "write to the lender"),
                ),
                Option(
                    "close the exhibition two weeks early",
                    "those are the two weakest weeks anyway",
                    "{groups} school groups are booked in them",
                    ("rebook the school groups",),
                ),
            ),
            ("thank the lender for her letter by telephone",),
            {"tickets": (1500, 4000, 500), "groups": (6, 16, 1)},
        ),
        Issue(
            "the humidity in the textile room",
            "the humidity in the textile room rises above sixty percent every afternoon",
            "The loggers in the textile room go above sixty percent every afternoon. It's worst"
            " on days with a lot of groups, and the flag from 1848 hangs right at the door.",
            (
                ("Is the flag in danger?", "Not this week. By the end of the summer, yes."),
                (
                    "What about the air conditioning?",
                    "It's {age} years old and running flat out, I'm afraid.",
                ),
            ),
            (
                Option(
                    "limit the room to fifteen people at a time",
                    "breath is most of the problem",
                    "somebody has to stand at the door and count",
                    ("put up a sign and a rope at the textile room", "change the guards' plan"),
                ),
                Option(
                    "rent two dehumidifiers for the summer",
                    "they can be here tomorrow",
                    "they hum so loudly that tours cannot be heard",
                    ("rent the dehumidifiers",),
                ),
                Option(
                    "take the flag down and rest it in the store",
                    "it has hung for longer than it should have",
                    "it is what most visitors come to that room for",
                    (
                        "prepare a place for the flag in the store",
                        "choose another piece for the wall",
                    ),
                ),
            ),
            ("send the readings to the restorer",),
            {"age": (17, 31, 1)},
        ),
        Issue(
            "the audio guides",
            "{broken} of the sixty audio guides no longer hold a charge",
            "I counted the audio guides. {broken} of sixty don't last a whole tour any more,"
            " and the"
            " maker stopped selling the batteries two years ago.",
            (
                ("How many do we lend on a good day?", "Forty, forty-five on rainy Sundays."),
                (
                    "What do people say about the content?",
                    "They like the stories. They hate the buttons.",
                ),
            ),
            (
                Option(
                    "put the tour on visitors' own phones",
                    "there is nothing to charge and nothing to disinfect",
                    "the cellar has no reception at all",
                    ("test the network in every room", "get the recordings out of the old system"),
                ),
                Option(
                    "buy thirty new devices",
                    "older visitors prefer to be handed something",
                    "they cost {price} euros each",
                    ("borrow a sample device",),
                ),
                Option(
                    "replace the guides by a printed booklet",
                    "it never breaks and people take it home",
                    "the voices of the witnesses would be lost",
                    ("write a test version of the booklet",),
                ),
            ),
            ("take the broken guides out of circulation",),
            {"broken": (17, 36, 1), "price": (110, 240, 10)},
        ),
        Issue(
            "the free Sunday",
            "the town wants the museum to be free on one Sunday a month",
            "The councillor for culture came up to me at the reception. The town would like"
            " one free"
            " Sunday a month, starting in the new year, and it hasn't said who pays.",
            (
                ("What do we take on a normal Sunday?", "{income} euros, give or take."),
                (
                    "Does it bring new people?",
                    "In the next town over, a third of the visitors had never been in before.",
                ),
            ),
            (
                Option(
                    "accept if the town covers half of the loss",
                    "new visitors are worth something and half can be borne",
                    "the town may cut it from the grant elsewhere",
                    ("draft a letter to the councillor", "add up the loss over a year"),
                ),
                Option(
                    "make the last hour free every day instead",
                    "it spreads the crowd and costs less",
                    "families cannot come at that hour",
                    ("count the visitors of the last hour for two weeks",),
                ),
                Option(
                    "try it in January and February only",
                    "these are the quiet months and show whether anybody comes",
                    "two months are too short for word to get around",
                    ("plan a family programme for the two Sundays",),
                ),
            ),
            ("ask the friends of the museum for volunteers on Sundays",),
            {"income": (500, 1400, 50)},
        ),
        Issue(
            "the skeleton from the church",
            "descendants have asked that the skeleton be taken off display",
            "We have a letter from a family who've traced their line to the woman in case seven,"
            " the skeleton from the church. They ask us, very politely, to stop showing her.",
            (
                (
                    "Is the connection certain?",
                    "As certain as parish books from the sixteen hundreds can be.",
                ),
                ("Is she on loan or ours?", "Ours since 1911, from the parish."),
            ),
            (
                Option(
                    "take the skeleton off display and keep it in the store",
                    "it respects the wish without destroying anything",
                    "the room loses the piece that it was built around",
                    ("plan the empty case in the church room", "answer the family"),
                ),
                Option(
                    "return her to the parish for burial",
                    "she was buried once and nobody asked her",
                    "the teeth are part of a study that runs until next year",
                    ("speak to the parish", "ask the university about the study"),
                ),
                Option(
                    "show a drawing and a text about the question",
                    "visitors learn more from the dispute than from bones",
                    "the family has not said whether it wants to be mentioned",
                    ("ask the family how it wants to be mentioned",),
                ),
            ),
            ("look up the record of the gift of 1911",),
        ),
        Issue(
            "the evening openings",
            "the Thursday evenings had {visitors} visitors on average",
            "The long Thursdays: {visitors} visitors on average, and on some evenings there were"
            " more of us in the building than of them.",
            (
                (
                    "What does an evening cost?",
                    "Two guards, the desk and the heating, so {cost} euros.",
                ),
                ("Which ones went well?", "The two with music. People queued for those."),
            ),
            (
                Option(
                    "open late only when there is a concert",
                    "the concerts were the only evenings that paid for themselves",
                    "people forget what is not regular",
                    ("find four musicians for the winter", "take the Thursdays off the website"),
                ),
                Option(
                    "move the long evening to Friday",
                    "the shops next door are open then",
                    "the guards do not want to give up Friday evenings",
                    ("ask the guards about Fridays",),
                ),
                Option(
                    "rent the rooms out on Thursdays",
                    "it brings in money without any programme",
                    "the alarm cannot be set for single rooms",
                    ("ask the alarm company about single rooms",),
                ),
            ),
            ("write up the numbers for the board",),
            {"visitors": (9, 26, 1), "cost": (350, 700, 50)},
        ),
    ),
)
