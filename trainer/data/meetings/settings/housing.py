"""A housing cooperative and its residents."""

from trainer.data.meetings.issue import Issue, MeetingSetting, Option

HOUSING = MeetingSetting(
    "housing",
    (
        "House meeting",
        "Residents' meeting, block C",
        "Meeting of the cooperative's committee",
        "Courtyard group",
        "Board meeting of the cooperative",
        "Tenants' round",
    ),
    ("chair of the committee", "treasurer", "caretaker", "resident", "architect", "minute taker"),
    (
        Issue(
            "the bicycles in the stairwell",
            "the fire inspection found {bikes} bicycles in the stairwells",
            "The inspector counted {bikes} bicycles in the stairwells. He's given us until"
            " the end of"
            " next month, and after that it's a fine for each of them.",
            (
                (
                    "Why aren't they in the cellar?",
                    "Because of the nine steps. Try that with a cargo bike.",
                ),
                (
                    "Do they all belong to somebody?",
                    "At least ten have flat tyres and dust on them.",
                ),
            ),
            (
                Option(
                    "build a shelter in the courtyard",
                    "it is level and close to every door",
                    "it takes away the corner where the children play",
                    ("draw the shelter", "ask the town whether the shelter needs a permit"),
                ),
                Option(
                    "put a ramp on the cellar steps",
                    "the cellar is dry and it is empty",
                    "the steps are too steep for an electric bike",
                    ("build a ramp to try out",),
                ),
                Option(
                    "rent the empty shop for bicycles",
                    "it has a wide door and a shutter",
                    "its rent is {rent} euros a month",
                    ("ask the owner of the shop for a price",),
                ),
            ),
            ("tag the bicycles that nobody uses",),
            {"bikes": (14, 42, 1), "rent": (180, 420, 20)},
        ),
        Issue(
            "the heating bill",
            "the heating cost {percent} percent more than was paid in advance",
            "I've the bill here. We paid in advance as we always do, and it came out {percent}"
            " percent higher. For a flat of seventy square metres that's about {flat} euros.",
            (
                (
                    "Was it the price or the winter?",
                    "The price. We burned slightly less than last year.",
                ),
                ("Can people pay it in parts?", "If the board says so, yes."),
            ),
            (
                Option(
                    "spread the extra payment over twelve months",
                    "nobody has to find the whole sum at once",
                    "the account would be close to zero in March",
                    ("write the payment plan", "talk to the bank about March"),
                ),
                Option(
                    "lower the night temperature by two degrees",
                    "it saves about a tenth from now on",
                    "the corner flats are already cold",
                    ("set the boiler's night curve", "measure the corner flats for two weeks"),
                ),
                Option(
                    "take the difference out of the repair fund",
                    "the fund is fuller than planned this year",
                    "the roof has to be paid from it sooner or later",
                    ("ask the roofer when the roof is due",),
                ),
            ),
            ("explain the bill in a letter to every household",),
            {"percent": (12, 41, 1), "flat": (160, 480, 20)},
        ),
        Issue(
            "the old lime tree",
            "the tree inspector found a hollow {metres} metres up in the lime tree",
            "The inspector tapped the lime tree and found a hollow, {metres} metres up. It's"
            " standing"
            " for now, but he wouldn't put a bench under it, those were his words.",
            (
                ("Can it be saved?", "With a reduced crown and a brace, probably for ten years."),
                ("Who's liable if a branch comes down?", "We are, since we've had this report."),
            ),
            (
                Option(
                    "reduce the crown and brace the tree",
                    "it shades two flats that are unbearable without it",
                    "the check has to be repeated every year and paid for",
                    ("hire a tree surgeon", "close the path under the tree until then"),
                ),
                Option(
                    "fell it and plant two young ones",
                    "the question is then settled for fifty years",
                    "half the house moved in because of that tree",
                    ("apply for the felling permit",),
                ),
                Option(
                    "get a second opinion with a tension test",
                    "a tap with a hammer is not much to fell a tree on",
                    "until then somebody has to fence it off",
                    ("order the tension test", "put up a fence around the tree"),
                ),
            ),
            ("take the bench away from under the tree",),
            {"metres": (3, 7, 1)},
        ),
        Issue(
            "the parcels in the hallway",
            "{parcels} parcels went missing from the hallway this autumn",
            "That's now {parcels} parcels gone since September. I'm not saying it's one of us, the"
            " front door doesn't shut unless you pull it.",
            (
                ("Have the police been told?", "For the two expensive ones, yes. They took notes."),
                ("What's wrong with the door?", "The closer's worn out. The caretaker's seen it."),
            ),
            (
                Option(
                    "put up a locker for parcels",
                    "deliveries do not depend on who is at home",
                    "the locker takes up the place of the prams",
                    ("find out what a parcel locker costs", "ask the families about the prams"),
                ),
                Option(
                    "let the kiosk on the corner take the parcels",
                    "it is open until ten",
                    "carriers ring at the house whatever the label says",
                    ("agree a price per parcel with the kiosk",),
                ),
                Option(
                    "repair the door and hang a camera",
                    "most of it will stop when the door shuts",
                    "a camera in the hallway needs everybody's consent",
                    ("collect signatures about the camera",),
                ),
            ),
            ("replace the door closer",),
            {"parcels": (5, 14, 1)},
        ),
        Issue(
            "the common room",
            "the common room was booked for {parties} private parties in a month",
            "The common room. {parties} birthday parties last month, and the sewing circle met in"
            " my kitchen because there was no evening left. I like my kitchen, but still.",
            (
                ("Who keeps the calendar?", "It's a paper on the door, and pencils are patient."),
                ("Do the parties pay?", "Fifteen euros, if they remember."),
            ),
            (
                Option(
                    "keep two evenings a week for groups of the house",
                    "everybody knows in advance which evenings are free",
                    "the working parents can only celebrate in the evening",
                    ("mark the two evenings in the calendar",),
                ),
                Option(
                    "charge fifty euros for private parties",
                    "it pays for the cleaning that is needed afterwards",
                    "not everybody has fifty euros for a birthday",
                    ("write new rules for the room", "order a box for the room's money"),
                ),
                Option(
                    "move the calendar online",
                    "double bookings end by themselves",
                    "three households have no computer",
                    (
                        "set up an online calendar",
                        "explain the calendar to those without a computer",
                    ),
                ),
            ),
            ("clean the oven in the common room",),
            {"parties": (6, 13, 1)},
        ),
        Issue(
            "the solar panels",
            "the grant for solar panels ends in {weeks} weeks",
            "If we want the grant for the panels, the application has to be in within"
            " {weeks} weeks."
            " The roofer's been up there, and it'd carry them, on the south side at least.",
            (
                (
                    "What's in it for the tenants?",
                    "About {saving} euros a year each, if most of them take the power.",
                ),
                ("And if they don't?", "Then we sell it to the grid for next to nothing."),
            ),
            (
                Option(
                    "apply now and put panels on the south side",
                    "without the grant it never pays off",
                    "the chimney has to be raised before",
                    ("fill in the application", "ask the chimney sweep about the chimney"),
                ),
                Option(
                    "wait until the roof is renewed",
                    "the scaffolding is then paid for only once",
                    "nobody knows whether there will be a grant then",
                    ("ask the town about next year's grants",),
                ),
                Option(
                    "let an energy cooperative rent the roof",
                    "it needs none of the house's own money",
                    "the roof is then bound by contract for twenty years",
                    ("invite the energy cooperative to present its offer",),
                ),
            ),
            ("ask every household whether it would take the power",),
            {"weeks": (4, 9, 1), "saving": (60, 160, 10)},
        ),
    ),
)
