"""A bakery with a café."""

from trainer.data.meetings.issue import Issue, MeetingSetting, Option

BAKERY = MeetingSetting(
    "bakery",
    (
        "Shop meeting",
        "Early meeting, bakery and café",
        "Meeting before the season",
        "Weekly round of the bakehouse",
        "Staff meeting, main branch",
        "Branch meeting",
    ),
    ("owner", "master baker", "shop manager", "barista", "apprentice", "delivery driver"),
    (
        Issue(
            "the broken deck oven",
            "the upper deck no longer gets above {degrees} degrees",
            "The upper deck is finished, I think. It won't go above {degrees} degrees, and the rye"
            " came out like a doormat this morning.",
            (
                (
                    "Is it the element?",
                    "The technician says element and control board, and the board isn't made"
                    " any more.",
                ),
                (
                    "How long can we manage with the other decks?",
                    "Two weeks, if nobody orders anything big.",
                ),
            ),
            (
                Option(
                    "buy a used oven from the bakery that closes in the valley",
                    "it is four years old and costs a third of a new one",
                    "it has to be carried down a spiral staircase",
                    ("look at the used oven", "find out whether it fits through the cellar door"),
                ),
                Option(
                    "lease a new oven",
                    "repairs are included for five years",
                    "the rate is {rate} euros a month",
                    ("ask the bank and the maker for leasing terms",),
                ),
                Option(
                    "repair it with a board from an old machine",
                    "it could run again by Saturday",
                    "nobody gives a guarantee on it",
                    ("order the second-hand control board",),
                ),
            ),
            ("move the rye to the lower deck in the baking plan",),
            {"degrees": (170, 210, 5), "rate": (390, 690, 20)},
        ),
        Issue(
            "the bread that is left in the evening",
            "about {kilos} kilos of bread are thrown away each week",
            "I weighed it for a fortnight, as you asked. {kilos} kilos a week go in the bin, and"
            " most of it is the white rolls after four o'clock.",
            (
                (
                    "What about the food bank?",
                    "They come on Tuesdays and Fridays. The rest of the week it's on us.",
                ),
                (
                    "Could we just bake less?",
                    "We could, but then the shelf's empty at five and people notice.",
                ),
            ),
            (
                Option(
                    "sell surprise bags through the app",
                    "strangers come in and some of them come back",
                    "regulars might start to wait for the bags",
                    ("register the shop with the app", "decide what a bag costs and holds"),
                ),
                Option(
                    "bake the last rolls to order from two o'clock on",
                    "the shelf stays full without anything left over",
                    "somebody has to stay at the oven in the afternoon",
                    ("change the afternoon shift",),
                ),
                Option(
                    "make croutons and breadcrumbs of it",
                    "they keep for months and sell well before Christmas",
                    "the drying takes up the lower deck overnight",
                    ("test a batch of croutons", "find jars and labels for the croutons"),
                ),
            ),
            ("keep weighing the leftovers for another month",),
            {"kilos": (18, 46, 2)},
        ),
        Issue(
            "the Sunday shift",
            "two people have given notice that they no longer work on Sundays",
            "As of next month I've two people less on Sundays. They've told me in good time and I"
            " understand them, but I can't open the café with two.",
            (
                (
                    "What does a Sunday bring in?",
                    "About {sales} euros, nearly all of it before noon.",
                ),
                (
                    "Would more money help?",
                    "For one of them, maybe. The other one has a small child.",
                ),
            ),
            (
                Option(
                    "close the café on Sundays and sell over the counter only",
                    "two people can manage the counter",
                    "the Sunday breakfast is what people know the place for",
                    ("put up a notice about Sundays",),
                ),
                Option(
                    "pay a Sunday bonus",
                    "it is the fastest way to fill the shift",
                    "the other days will ask for one too",
                    ("calculate a bonus that still pays off",),
                ),
                Option(
                    "open from eight to noon only",
                    "that is when the money comes in anyway",
                    "the church crowd arrives at half past eleven and stays",
                    ("change the opening hours everywhere they are written",),
                ),
            ),
            ("ask the students whether they want Sunday hours",),
            {"sales": (600, 1500, 50)},
        ),
        Issue(
            "the wedding order in May",
            "the couple now wants {cakes} small cakes instead of one large one",
            "The couple from the vineyard rang. They don't want the big cake any more, they'd like"
            " {cakes} small ones, each different. The wedding's still on the same Saturday.",
            (
                ("Have they paid a deposit?", "Half, on the old price."),
                (
                    "How different is different?",
                    "Five kinds would be enough, I think they'd accept that.",
                ),
            ),
            (
                Option(
                    "accept with five kinds and a new price",
                    "five kinds can be prepared two days ahead",
                    "the cold room is full of quiche on that weekend",
                    ("write the couple a new offer", "clear a shelf in the cold room"),
                ),
                Option(
                    "offer them the large cake and a table of biscuits",
                    "it looks like a lot and can be baked the week before",
                    "they have said twice that they want small cakes",
                    ("photograph a sample table of biscuits",),
                ),
                Option(
                    "pass the order on to the patisserie in town",
                    "May is too full as it is",
                    "the vineyard sends several weddings a year",
                    ("call the patisserie about the order",),
                ),
            ),
            ("get the final number of guests in writing",),
            {"cakes": (30, 80, 5)},
        ),
        Issue(
            "the price of coffee",
            "the roaster's price has risen by {percent} percent since last year",
            "Beans are up {percent} percent on last year, and oat milk as well. We've kept the"
            " cappuccino where it was, so it's basically a hobby now.",
            (
                (
                    "What do the others in the street charge?",
                    "Thirty to fifty cents more than we do.",
                ),
                ("Did anybody complain last time?", "Three people, and they still come."),
            ),
            (
                Option(
                    "raise all coffees by thirty cents",
                    "one clear step is better than three small ones",
                    "the pensioners' table orders nothing but filter coffee",
                    ("print new price boards", "reprogram the till"),
                ),
                Option(
                    "raise everything except filter coffee",
                    "the regulars keep their price and the rest pays for it",
                    "filter coffee is where the loss is largest",
                    ("calculate each drink again",),
                ),
                Option(
                    "change to a cheaper roaster",
                    "the price on the board can stay",
                    "the coffee is the reason half of the guests come",
                    ("taste samples from two roasters",),
                ),
            ),
            ("talk to the roaster about a yearly contract",),
            {"percent": (14, 38, 1)},
        ),
        Issue(
            "the nut allergy label",
            "a customer with an allergy was sold the wrong slice",
            "On Saturday somebody with a nut allergy got the carrot cake instead of the apple cake."
            " She noticed before she ate it, thank God. The two labels had been swapped.",
            (
                (
                    "Who puts the labels out?",
                    "Whoever opens. There's no rule, and that's the problem.",
                ),
                (
                    "Do we have to report it?",
                    "No, because nothing happened. I'd still write it down.",
                ),
            ),
            (
                Option(
                    "print the allergens on the label of each cake",
                    "the information stays with the cake wherever it stands",
                    "it needs a printer in the bakehouse",
                    ("buy a label printer", "list the allergens of every recipe"),
                ),
                Option(
                    "keep everything with nuts on a tray of its own",
                    "it can be done this afternoon",
                    "the counter has room for only {trays} trays",
                    ("rearrange the counter",),
                ),
                Option(
                    "take nuts out of the range",
                    "nothing can be confused any more",
                    "the nut corner is the best seller in autumn",
                    ("work out a carrot cake without nuts",),
                ),
            ),
            ("call the customer and apologise",),
            {"trays": (5, 10, 1)},
        ),
    ),
)
