"""A medical practice."""

from trainer.data.meetings.issue import Issue, MeetingSetting, Option

CLINIC = MeetingSetting(
    "clinic",
    (
        "Practice meeting",
        "Monday meeting of the practice",
        "Staff meeting, group practice",
        "Team round",
        "Practice management meeting",
        "Quarterly practice review",
    ),
    ("practice manager", "doctor", "nurse", "receptionist", "trainee doctor", "pharmacist"),
    (
        Issue(
            "the waiting time on the telephone",
            "patients wait {minutes} minutes on average before anybody answers",
            "I pulled the figures from the phone system. On Monday mornings people wait {minutes}"
            " minutes on average, and one in five hangs up before we answer.",
            (
                (
                    "What do they ring about?",
                    "Half of it is repeat prescriptions, and a good part is test results.",
                ),
                ("Is it only Mondays?", "Mondays are the worst. From Wednesday on it's bearable."),
            ),
            (
                Option(
                    "take repeat prescriptions by a form on the website",
                    "half of the calls would not be needed",
                    "many of the older patients do not use the website",
                    ("set up the prescription form", "print a leaflet about the prescription form"),
                ),
                Option(
                    "put a third person on the phones on Mondays",
                    "it helps everybody who rings, whatever they ring about",
                    "the front desk is then alone with the whole waiting room",
                    ("change the Monday rota",),
                ),
                Option(
                    "offer to call people back",
                    "nobody has to listen to the music",
                    "the telephone company charges {fee} euros a month for it",
                    ("ask the telephone company for a trial month",),
                ),
            ),
            ("measure the waiting time again in a month",),
            {"minutes": (7, 19, 1), "fee": (40, 120, 10)},
        ),
        Issue(
            "the vaccine fridge",
            "the fridge was above eight degrees for two hours on Sunday night",
            "The logger shows that the vaccine fridge went above eight degrees on Sunday night, for"
            " about two hours. Probably the door; the seal's been soft for a while.",
            (
                ("What was in it?", "{doses} doses, mostly flu and tetanus."),
                (
                    "Can they still be used?",
                    "The flu ones yes, says the manufacturer. I'm still waiting about the tetanus.",
                ),
            ),
            (
                Option(
                    "buy a new fridge with an alarm",
                    "one lost load of vaccine costs more than the fridge",
                    "it takes three weeks to be delivered",
                    ("order the new fridge", "arrange the disposal of the old fridge"),
                ),
                Option(
                    "replace the seal and check the logger twice a day",
                    "the seal costs thirty euros and comes tomorrow",
                    "nobody is there to check it on Sundays",
                    ("order the seal", "put the fridge check on the daily list"),
                ),
                Option(
                    "keep vaccines at the pharmacy downstairs",
                    "they are monitored around the clock there",
                    "somebody has to go down for every single dose",
                    ("agree the storage with the pharmacy in writing",),
                ),
            ),
            ("report the incident to the health authority",),
            {"doses": (40, 160, 10)},
        ),
        Issue(
            "the missed appointments",
            "{missed} appointments were missed last month without a word",
            "Last month {missed} people simply didn't come. That's more than two whole mornings of"
            " a doctor, while others wait three weeks for an appointment.",
            (
                (
                    "Are they always the same people?",
                    "About a third are. The rest is a bit of everybody.",
                ),
                (
                    "Do we remind them?",
                    "Only those who gave us a mobile number, so a bit over half.",
                ),
            ),
            (
                Option(
                    "send reminders to everybody two days before",
                    "other practices halved their missed appointments that way",
                    "somebody has to collect the missing numbers first",
                    (
                        "collect mobile numbers at the front desk",
                        "switch on reminders for all appointments",
                    ),
                ),
                Option(
                    "charge ten euros for a missed appointment",
                    "it makes clear that the time was kept free",
                    "it hits those who forget because they are ill",
                    ("ask the association whether a fee is allowed",),
                ),
                Option(
                    "keep two slots a day for people who come without an appointment",
                    "the gaps are used whoever fails to come",
                    "word gets around and the waiting room fills up",
                    ("block two open slots a day in the calendar",),
                ),
            ),
            ("list the patients who missed three appointments or more",),
            {"missed": (38, 90, 1)},
        ),
        Issue(
            "the parking spaces",
            "the spaces in front of the door are taken by customers of the gym",
            "Somebody on crutches had to park two streets away on Friday, because the gym's"
            " customers were in our spaces. It's every evening now.",
            (
                (
                    "Are the spaces marked?",
                    "There's a sign, but it's behind the hedge. You have to know it.",
                ),
                (
                    "Has anybody talked to the gym?",
                    "I have. They were nice about it and nothing happened.",
                ),
            ),
            (
                Option(
                    "have the cars towed after a warning",
                    "it works within a week at the practice next door",
                    "sooner or later it hits a patient",
                    ("find a towing company", "put up a proper warning sign"),
                ),
                Option(
                    "install a bollard for two of the spaces",
                    "those who really need a space always have one",
                    "reception has to lower it by remote control",
                    ("get a price for the bollard",),
                ),
                Option(
                    "agree with the gym that it repaints and watches the spaces",
                    "it costs nothing and keeps the peace",
                    "it depends on whoever works at the gym that evening",
                    ("meet the manager of the gym",),
                ),
            ),
            ("cut back the hedge",),
        ),
        Issue(
            "the new trainee's supervision",
            "the new trainee sees patients alone before the supervisor has time",
            "I don't want to blame anybody, but on Thursday the trainee saw {patients} patients"
            " before one of us had time to go over a single one of them.",
            (
                (
                    "Was anything missed?",
                    "No. But it was luck as much as skill, and the trainee said so too.",
                ),
                ("What does the contract say?", "One hour of supervision a day, in writing."),
            ),
            (
                Option(
                    "reserve the hour after lunch for supervision",
                    "the phones are quiet then",
                    "it costs {slots} appointments a week",
                    ("block the hour after lunch in the calendar",),
                ),
                Option(
                    "let the trainee sit in with a different doctor each day",
                    "the load is spread and the trainee sees more",
                    "nobody feels responsible in the end",
                    ("write a plan of who supervises when",),
                ),
                Option(
                    "give the trainee shorter lists for the first three months",
                    "there is time to ask about every patient",
                    "the regular patients will wait longer",
                    ("shorten the trainee's lists", "tell reception about the shorter lists"),
                ),
            ),
            ("ask the trainee how the first weeks were",),
            {"patients": (6, 13, 1), "slots": (10, 20, 1)},
        ),
        Issue(
            "the paper files in the cellar",
            "water stood in the cellar after the storm",
            "After the storm there were about three centimetres of water in the cellar. The lowest"
            " shelf of files is wet, that's roughly {files} patients.",
            (
                (
                    "How long do we have to keep them?",
                    "Ten years. Some of those are older and could have gone.",
                ),
                ("Is everything in the computer as well?", "From 2014 on, yes. Not before."),
            ),
            (
                Option(
                    "have the files scanned and destroyed",
                    "then no storm matters any more",
                    "the offer is {price} euros",
                    (
                        "compare the scanning offer with a second one",
                        "sort out files older than ten years",
                    ),
                ),
                Option(
                    "move the files to the attic",
                    "it is dry and it costs a weekend",
                    "the attic's floor may not carry the weight",
                    ("ask the landlord about the attic's floor",),
                ),
                Option(
                    "raise the shelves and fit a pump",
                    "the files stay where everybody finds them",
                    "the next storm may be worse than the pump",
                    ("get a plumber's offer for a pump",),
                ),
            ),
            ("hang up the wet files to dry",),
            {"files": (80, 240, 20), "price": (1900, 5200, 100)},
        ),
    ),
)
