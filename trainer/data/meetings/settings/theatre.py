"""An amateur theatre company."""

from trainer.data.meetings.issue import Issue, MeetingSetting, Option

THEATRE = MeetingSetting(
    "theatre",
    (
        "Production meeting",
        "Ensemble meeting",
        "Meeting after the read-through",
        "Company meeting, summer production",
        "Last meeting before the premiere",
        "Stage meeting",
    ),
    ("director", "stage manager", "lighting designer", "costume maker", "actor", "front of house"),
    (
        Issue(
            "the second cast for the lead",
            "the lead has lost her voice and has to rest for {days} days",
            "The doctor says {days} days without talking, not even whispering. She's devastated,"
            " she wrote it to me on three pages.",
            (
                ("That takes us to when?", "To the week of the premiere, roughly. It'll be close."),
                ("Who knows the part?", "Two people know the text. Nobody knows the songs."),
            ),
            (
                Option(
                    "rehearse an understudy from tonight",
                    "a prepared understudy costs nothing if she is not needed",
                    "the understudy's own part would need somebody too",
                    ("choose the understudy", "shorten the dress to fit the understudy"),
                ),
                Option(
                    "move the premiere back by a week",
                    "the lead would have time to recover properly",
                    "{sold} tickets are already sold for the first night",
                    ("write to everybody with a first-night ticket",),
                ),
                Option(
                    "turn the songs into spoken text",
                    "the lead could play after all",
                    "the songs are the reason people know the play",
                    ("try the spoken version in a rehearsal",),
                ),
            ),
            ("send the lead flowers from all of us",),
            {"days": (9, 16, 1), "sold": (60, 180, 10)},
        ),
        Issue(
            "the revolving stage",
            "the motor of the revolving stage overheats after {minutes} minutes",
            "It turns beautifully for {minutes} minutes. Then it smells, and then it stops, and"
            " yesterday it stopped with the sofa facing the wall.",
            (
                ("Is it the load?", "The piano's on it. Without the piano it runs all evening."),
                ("Can it be turned by hand?", "By four people, if they're invisible."),
            ),
            (
                Option(
                    "take the piano off the revolve",
                    "it costs nothing and solves it",
                    "the second act was built around the piano",
                    ("restage the second act without the piano", "mark a new place for the piano"),
                ),
                Option(
                    "rent a stronger motor",
                    "the set can stay as it is",
                    "it has to be wired by an electrician from outside",
                    ("get a quote for a stronger motor", "book an electrician"),
                ),
                Option(
                    "push the revolve by hand and let the audience see it",
                    "it fits a play about a travelling circus",
                    "the stage hands have never been in costume",
                    ("find costumes for the stage hands",),
                ),
            ),
            ("keep a fire extinguisher at the motor",),
            {"minutes": (12, 35, 1)},
        ),
        Issue(
            "the fog in the third act",
            "the fog machine set off the alarm in the dress rehearsal",
            "You were all there: the fog came, the alarm went, and {count} people stood in the car"
            " park in Roman sandals. The fire brigade was kind, but a second time costs us.",
            (
                ("What does it cost?", "Four hundred euros for each false alarm."),
                (
                    "Can the detectors be switched off?",
                    "Only with a fire watch in the house, for as long as the play lasts.",
                ),
            ),
            (
                Option(
                    "hire a fire watch for each evening",
                    "the picture of the ghost ship depends on the fog",
                    "it costs more than the costumes did",
                    ("ask the volunteer fire brigade for a watch",),
                ),
                Option(
                    "use a low-lying fog with dry ice",
                    "it stays on the floor and away from the detectors",
                    "somebody has to fetch the ice on every evening",
                    (
                        "test dry ice with the alarm company on the line",
                        "find a supplier of dry ice",
                    ),
                ),
                Option(
                    "do it with light and a gauze",
                    "nothing can go off and nothing can run out",
                    "the gauze takes two evenings to hang",
                    ("hang the gauze",),
                ),
            ),
            ("write the fire brigade a letter of thanks",),
            {"count": (25, 60, 1)},
        ),
        Issue(
            "the programme booklet",
            "the printer needs the booklet {days} days earlier than planned",
            "The print shop has rung: they're off over the holidays, so they need the"
            " booklet {days}"
            " days earlier. I have the cast list and one advertisement. That's the booklet so far.",
            (
                (
                    "How many do we print?",
                    "Eight hundred, as always, and we throw two hundred away.",
                ),
                ("Do the advertisers pay on time?", "The butcher does."),
            ),
            (
                Option(
                    "print a folded sheet and put the rest online",
                    "a sheet can be ready by the weekend",
                    "the advertisers paid for a whole page",
                    ("lay out the folded sheet", "offer the advertisers a place on the website"),
                ),
                Option(
                    "change to a printer that works over the holidays",
                    "the booklet could appear as it always did",
                    "the usual printer gives a discount because his son plays the trumpet",
                    ("compare two online printers",),
                ),
                Option(
                    "collect all texts by Sunday and make the new date",
                    "it has been done before",
                    "the last time the conductor's name was spelt wrong",
                    ("collect the texts from everybody", "proofread the booklet"),
                ),
            ),
            ("get this season's sponsors' logos",),
            {"days": (6, 14, 1)},
        ),
        Issue(
            "the noise from the building site",
            "the building site next door starts night work in the week of the premiere",
            "I spoke to the site manager next door. From the week of the premiere they'll be"
            " driving"
            " sheet piles after eight. He did offer me ear protection.",
            (
                ("All evening?", "From eight to eleven, Monday to Thursday."),
                ("Do they need a permit for that?", "They have one. It's pinned to the fence."),
            ),
            (
                Option(
                    "play from Friday to Sunday with two matinees",
                    "there is no work on those days",
                    "three in the cast work weekends at the hospital",
                    ("ask the cast about weekends", "change the dates in the ticket shop"),
                ),
                Option(
                    "move to the parish hall for the first week",
                    "it is quiet and has {seats} seats",
                    "the set is forty centimetres too tall for it",
                    ("measure the parish hall", "saw down the arch of the set"),
                ),
                Option(
                    "start at five on weekdays",
                    "the play would be over before the piles",
                    "people who work cannot come at five",
                    ("ask last year's audience about an early start",),
                ),
            ),
            ("get the site's schedule in writing",),
            {"seats": (90, 180, 10)},
        ),
        Issue(
            "the membership fee",
            "the club has {loss} euros less than at this time last year",
            "I'll keep it short. We're {loss} euros down on last year. It's the rent for the"
            " rehearsal room, and the fee hasn't changed since 2012.",
            (
                ("How many paying members do we have?", "{members}, and a few who've stopped."),
                ("What did the last show bring in?", "More than it cost, but only just."),
            ),
            (
                Option(
                    "raise the fee by two euros a month",
                    "it closes the gap without any event",
                    "some of the young ones will leave",
                    ("prepare the motion for the general meeting",),
                ),
                Option(
                    "hold a costume sale in the spring",
                    "the store has to be cleared out anyway",
                    "it earns money once and not every year",
                    ("choose costumes for the sale", "find a date for the sale"),
                ),
                Option(
                    "share the rehearsal room with the choir",
                    "half the rent is the whole gap",
                    "the choir leaves its risers standing",
                    ("talk to the choir about the room",),
                ),
            ),
            ("remind members who have not paid",),
            {"loss": (600, 2200, 100), "members": (34, 70, 2)},
        ),
    ),
)
