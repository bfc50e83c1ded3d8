"""A warehouse that ships parcels."""

from trainer.data.meetings.issue import Issue, MeetingSetting, Option

WAREHOUSE = MeetingSetting(
    "warehouse",
    (
        "Shift leaders' meeting",
        "Operations meeting",
        "Logistics weekly",
        "Safety and operations round",
        "Peak season meeting",
        "Site meeting, hall two",
    ),
    (
        "site manager",
        "shift leader",
        "safety officer",
        "fleet coordinator",
        "inventory clerk",
        "works council member",
    ),
    (
        Issue(
            "the forklift near miss",
            "a forklift and a picker nearly collided at aisle nine",
            "Wednesday, twenty past six, aisle nine: a forklift came out backwards and missed a"
            " picker by the width of a pallet. I've seen the video and I don't want to see"
            " it again.",
            (
                (
                    "Was the driver too fast?",
                    "No, eight kilometres an hour. He simply couldn't see her.",
                ),
                ("Is there a mirror?", "There was one. It was knocked off {weeks} weeks ago."),
            ),
            (
                Option(
                    "make aisles eight to ten one-way",
                    "nobody has to reverse any more",
                    "each pick round gets about {metres} metres longer",
                    (
                        "paint the arrows in aisles eight to ten",
                        "change the pick routes in the system",
                    ),
                ),
                Option(
                    "fit blue warning lights to all forklifts",
                    "the light is on the floor before the truck is there",
                    "after a month nobody sees it any more",
                    ("order blue lights for the fleet",),
                ),
                Option(
                    "separate the shifts of pickers and forklifts in that block",
                    "people and trucks do not meet at all",
                    "the replenishment would move into the night",
                    ("check with the works council whether nights are possible",),
                ),
            ),
            ("put the mirror back up", "show the video at every shift start"),
            {"weeks": (3, 9, 1), "metres": (60, 180, 20)},
        ),
        Issue(
            "the returns that pile up",
            "{pallets} pallets of returns stand in front of gate three",
            "There are {pallets} pallets of returns in front of gate three, and the oldest label I"
            " found was from before the holidays. Some of it's shoes, some of it used to be.",
            (
                (
                    "Why don't we keep up?",
                    "Every parcel gets opened, photographed and typed in by hand. Four"
                    " minutes each.",
                ),
                ("What's it worth?", "If we sell it this season, a lot. Next season, not much."),
            ),
            (
                Option(
                    "put six people on returns for two weeks",
                    "the stock is still in season then",
                    "they would be missing at outbound",
                    ("name the six people for returns",),
                ),
                Option(
                    "sort unopened parcels straight back to the shelf",
                    "about a third of them have never been opened",
                    "now and then there is a brick in one",
                    ("write a rule for unopened returns", "train the late shift on the rule"),
                ),
                Option(
                    "sell the pallets unopened to a trader",
                    "gate three would be free by the weekend",
                    "a trader pays a tenth of the value",
                    ("ask two traders for a price",),
                ),
            ),
            ("clear the fire door at gate three today",),
            {"pallets": (30, 90, 5)},
        ),
        Issue(
            "the heat under the roof",
            "it was {degrees} degrees on the mezzanine on Tuesday",
            "We measured {degrees} degrees on the mezzanine on Tuesday at three. One colleague had"
            " to sit down for an hour, and more than one said nothing and should have.",
            (
                (
                    "What are we obliged to do?",
                    "Above thirty we have to act, and above thirty-five nobody may work"
                    " there without measures.",
                ),
                ("Do the roof windows open?", "Half of them do. The others are stuck."),
            ),
            (
                Option(
                    "start the early shift at four during hot weeks",
                    "the work is done before the roof heats up",
                    "there is no bus at that hour",
                    ("ask who needs a lift at four", "post the summer shift times"),
                ),
                Option(
                    "add a paid break of ten minutes every hour",
                    "it can start this afternoon",
                    "the throughput drops by about a sixth",
                    ("tell the customers about slower days",),
                ),
                Option(
                    "rent cooling units for the mezzanine",
                    "nobody has to change anything else",
                    "they cost {rent} euros a week",
                    ("get a quote for cooling units", "check the power supply of the mezzanine"),
                ),
            ),
            ("repair the stuck roof windows", "put out water at every station"),
            {"degrees": (33, 39, 1), "rent": (800, 2200, 100)},
        ),
        Issue(
            "the new scanner gloves",
            "the trial of the scanner gloves ends on Friday",
            "The glove trial ends Friday. {saved} seconds saved per pick, the supplier says; my own"
            " stopwatch says a bit less. But one in four doesn't want to wear them.",
            (
                (
                    "Why don't they?",
                    "Sweat, mostly. And left-handers got right-hand gloves, honestly.",
                ),
                (
                    "Do they track people?",
                    "They could. We'd have to switch that off in the contract.",
                ),
            ),
            (
                Option(
                    "buy gloves for those who want them",
                    "a tool that people want needs no persuading",
                    "two kinds of scanner mean two kinds of spares",
                    ("collect names and sizes for the gloves", "strike tracking from the contract"),
                ),
                Option(
                    "extend the trial by a month with left-hand models",
                    "the decision would be fair to everybody",
                    "the supplier's discount ends this month",
                    ("negotiate a longer discount",),
                ),
                Option(
                    "send the gloves back",
                    "the old scanners are paid for",
                    "the old scanners need new batteries this year anyway",
                    ("price new batteries for the old scanners",),
                ),
            ),
            ("ask every tester for a line of feedback",),
            {"saved": (2, 5, 1)},
        ),
        Issue(
            "the inventory count",
            "the system and the shelves differ at {rate} percent of the places",
            "I had two hundred places counted at random. {rate} percent don't match the system, and"
            " it's not just a few missing, there's stock the system's never heard of.",
            (
                ("Where is it worst?", "Small parts, and everything near the packing tables."),
                ("When was the last full count?", "Fourteen months ago."),
            ),
            (
                Option(
                    "close for a day and count everything",
                    "it is over in a day and everybody trusts it afterwards",
                    "a lost day is {parcels} parcels late",
                    ("pick the day for the full count", "announce the closed day to the customers"),
                ),
                Option(
                    "count a hundred places a night",
                    "nothing has to stop",
                    "it takes four months to get round once",
                    ("write the nightly count lists",),
                ),
                Option(
                    "count the small parts only",
                    "they cause most of the errors",
                    "the stock that nobody knows of stays where it is",
                    ("borrow counting scales",),
                ),
            ),
            ("find out how stock gets onto shelves without a booking",),
            {"rate": (3, 9, 1), "parcels": (3000, 9000, 500)},
        ),
        Issue(
            "the night lorry",
            "the carrier wants to collect at ten instead of at midnight",
            "The carrier's told me that from the first of the month their lorry leaves at"
            " ten, not at"
            " midnight. If we miss it, everything we pack after ten arrives a day late.",
            (
                ("How much do we pack after ten?", "About {share} percent of the day."),
                ("Can they be talked out of it?", "They were friendly. I'd say no."),
            ),
            (
                Option(
                    "move the cut-off for orders to six in the evening",
                    "the promise to customers stays honest",
                    "two competitors take orders until eight",
                    ("change the cut-off on the shop's page",),
                ),
                Option(
                    "find a second carrier for the late parcels",
                    "the late orders are the most profitable ones",
                    "two carriers mean two labels and two scanners at each table",
                    ("ask three carriers for a midnight collection",),
                ),
                Option(
                    "start the late shift an hour earlier",
                    "most of the volume would make the ten o'clock lorry",
                    "parents on the late shift chose it for its hours",
                    ("hold a vote in the late shift", "adjust the canteen hours"),
                ),
            ),
            ("get the carrier's change in writing",),
            {"share": (12, 28, 1)},
        ),
    ),
)
