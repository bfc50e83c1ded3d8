"""A parents' association and the teachers it works with."""

from trainer.data.meetings.issue import Issue, MeetingSetting, Option

SCHOOL = MeetingSetting(
    "school",
    (
        "Parents' association",
        "Parents' council, spring term",
        "Open day committee",
        "School forum",
        "Parents' evening",
        "Festival committee",
    ),
    ("head teacher", "treasurer", "class representative", "caretaker", "secretary", "art teacher"),
    (
        Issue(
            "the venue for the open day",
            "the sports hall is double-booked on that Saturday",
            "I rang the council yesterday. The sports hall is gone: there's a badminton tournament"
            " in it on our Saturday, and they had it in writing before we did.",
            (
                (
                    "How many visitors are we planning for?",
                    "About {visitors}, if the weather holds. Last year it was a bit less.",
                ),
                (
                    "Could the tournament not move?",
                    "I asked. They have teams coming from three counties, so no.",
                ),
            ),
            (
                Option(
                    "hold the open day in the library courtyard",
                    "the courtyard is free and right on the bus route",
                    "there is no roof if it rains",
                    ("book the library courtyard", "borrow two marquees from the scouts"),
                ),
                Option(
                    "move the open day to the Saturday after",
                    "the hall is empty then",
                    "half of the leaflets with the old date have already gone out",
                    ("confirm the hall for the new Saturday", "correct the date on the website"),
                ),
                Option(
                    "stay in the school and use the corridors as a gallery",
                    "nothing has to be carried anywhere",
                    "the fire officer allows only {gallery} people on that floor",
                    ("ask the fire officer for a higher limit",),
                ),
            ),
            ("tell the volunteers where to be",),
            {"visitors": (140, 320, 20), "gallery": (60, 100, 10)},
        ),
        Issue(
            "the price of school lunches",
            "the caterer raises its price by {cents} cents a meal from next term",
            "The caterer has written. From next term a meal costs {cents} cents more, and they say"
            " it's the price of vegetables and not negotiable.",
            (
                (
                    "What would that be for a family with two kids?",
                    "Roughly {month} euros a month on top.",
                ),
                (
                    "Does the contract allow that?",
                    "Once a year, with eight weeks' notice. They gave nine.",
                ),
            ),
            (
                Option(
                    "pay the increase out of the association's reserve until the summer",
                    "no family has to find the money in the middle of the year",
                    "the reserve was meant for the new playground",
                    ("work out what the increase costs until July",),
                ),
                Option(
                    "pass the increase on and widen the hardship fund",
                    "those who can pay do, and the others are covered",
                    "some families are ashamed to apply for the fund",
                    (
                        "rewrite the form for the hardship fund",
                        "explain the new price in the newsletter",
                    ),
                ),
                Option(
                    "invite offers from two other caterers",
                    "nobody has compared prices for five years",
                    "a change of caterer in the middle of the year means two weeks of sandwiches",
                    ("ask two other caterers for a price per meal",),
                ),
            ),
            ("answer the caterer's letter",),
            {"cents": (25, 70, 5), "month": (14, 30, 2)},
        ),
        Issue(
            "the crossing in front of the school",
            "a pupil was nearly hit by a van on the crossing last week",
            "You'll have heard about last Tuesday. A van went straight through while the patrol"
            " was holding children back. Nobody was hurt, but it was a matter of half a metre.",
            (
                ("Did anybody get the number plate?", "Two parents did, and the police have it."),
                (
                    "Was it the first time?",
                    "The first time I know of, but the patrol says it happens every month or so.",
                ),
            ),
            (
                Option(
                    "ask the town for a raised crossing",
                    "cars have to slow down for it whether they want to or not",
                    "the town usually takes a year for that",
                    (
                        "write to the town's traffic office",
                        "collect the parents' reports of near misses",
                    ),
                ),
                Option(
                    "add a second adult to the patrol in the mornings",
                    "it can start on Monday",
                    "the rota already has {gaps} empty slots a month",
                    ("call for more patrol volunteers", "order two more high-visibility vests"),
                ),
                Option(
                    "close the lane in front of the gate for half an hour each morning",
                    "other schools report no accidents since they did that",
                    "the delivery for the kitchen comes at exactly that time",
                    ("agree another delivery time with the kitchen",),
                ),
            ),
            ("thank the patrol in writing",),
            {"gaps": (3, 9, 1)},
        ),
        Issue(
            "the class trip of year six",
            "the hostel by the lake has closed for good",
            "Bad news about the year-six trip: the hostel has closed, for good, not for the season."
            " Our deposit of {deposit} euros is coming back, they've promised that in writing.",
            (
                ("How many children is it?", "{children}, and four adults."),
                ("When would they have gone?", "The second week of June, Monday to Friday."),
            ),
            (
                Option(
                    "take the youth hostel in the old mill",
                    "it is twenty minutes further and has room in that very week",
                    "it costs {extra} euros more for each child",
                    ("reserve the old mill", "ask the bus company about the longer route"),
                ),
                Option(
                    "camp at the sailing club",
                    "the club lends its tents and boats for nothing",
                    "two of the children cannot sleep on the ground for medical reasons",
                    ("inspect the sailing club's washrooms", "check the insurance for camping"),
                ),
                Option(
                    "turn the trip into three day trips",
                    "nobody is left out because of the overnight stay",
                    "the week together is the whole point of year six",
                    ("draft a plan for the three days",),
                ),
            ),
            ("tell the year-six parents about the hostel",),
            {"deposit": (400, 900, 50), "children": (24, 58, 2), "extra": (12, 36, 4)},
        ),
        Issue(
            "telephones in the breaks",
            "teachers report fights over videos that were filmed in the yard",
            "We've had {cases} incidents this month where somebody filmed somebody else in the"
            " yard, and twice it ended in a fight. The staff would like a rule, not a poster.",
            (
                (
                    "What do other schools do?",
                    "Everything from lockers to nothing at all. Lockers seem to work where"
                    " there's money.",
                ),
                (
                    "Do the pupils have a view?",
                    "The pupils' council is split, the younger ones actually want a ban.",
                ),
            ),
            (
                Option(
                    "ban telephones from the yard until year eight",
                    "the incidents are nearly all in the lower years",
                    "the older pupils will lend theirs out",
                    ("word the new rule for the school code",),
                ),
                Option(
                    "buy lockable pouches for one year as a trial",
                    "the phones stay with their owners and nobody has to confiscate anything",
                    "the pouches cost {pouches} euros a class",
                    ("get an offer for the pouches", "find a class that volunteers for the trial"),
                ),
                Option(
                    "leave the rule as it is and train mediators",
                    "a ban only moves the filming to the bus stop",
                    "the training takes until autumn",
                    ("sign up six pupils for the mediators' course",),
                ),
            ),
            ("put the subject on the pupils' council's agenda",),
            {"cases": (4, 11, 1), "pouches": (280, 520, 20)},
        ),
        Issue(
            "the second-hand uniform sale",
            "the storeroom with the uniforms has damp in it",
            "I opened the storeroom on Monday and about a third of the blazers smell of mould."
            " The caretaker thinks the gutter outside has been leaking since Christmas.",
            (
                (
                    "Is any of it worth washing?",
                    "The shirts, yes. The blazers need dry cleaning, that's {clean} euros each.",
                ),
                ("When's the sale?", "In five weeks, so there's some time."),
            ),
            (
                Option(
                    "give the sale a rail in the entrance hall instead of a storeroom",
                    "people see it every day and it stays dry",
                    "the entrance is an escape route",
                    ("measure the entrance hall", "ask the insurer about the escape route"),
                ),
                Option(
                    "clean what is left and hold the sale as planned",
                    "families count on it before the summer",
                    "the cleaning eats most of what the sale brings in",
                    ("sort the uniforms by condition", "take the blazers to the dry cleaner"),
                ),
                Option(
                    "swap uniforms through the class chats this year",
                    "it needs no room at all",
                    "families who join late never see the offers",
                    ("set up a list for the swaps",),
                ),
            ),
            ("get the gutter repaired",),
            {"clean": (8, 15, 1)},
        ),
    ),
)
