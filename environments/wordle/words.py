"""Common English words of five letters."""

WORDS = tuple(
    """
about above actor adult after again agree ahead alarm album alive alone angel anger angle apple april arena arrow aside
award bacon baker basin beach beard begin below bench berry birth black blade blame blank bless blind block blood board
brain brand brave bread break brick bride brief bring broad broom brown brush build bunch cabin camel candy carry catch
cause chain chair chalk charm chase cheap check cheek chess chest chief child civil clean clear clerk climb clock close
cloth cloud coach coast color count court cover crane cream crime crowd crown curve cycle dairy dance delay diary dirty
doubt dozen dream dress drink drive eager eagle early earth eight elbow empty enemy enjoy enter equal error event every
extra faith false fancy fault fence fever field fifty fight final first flame float floor flour force forty fresh front
fruit funny ghost giant glass globe glove grain grape grass great green group guard guess guest guide happy heart heavy
hello honey horse hotel house human hurry ideal image inner issue jelly jewel joint judge juice knife knock label large
laugh layer learn lemon level light limit local lucky lunch magic major maple march match maybe metal money month mouse
mouth movie music never night noise north novel nurse ocean offer often olive onion orbit order other owner paint paper
party peace pearl phone photo piano pilot pizza place plane plant plate point pound power price pride prize proud queen
quick quiet radio raise reach ready right river robot rough round royal salad scale scene score shade shape share sharp
sheep sheet shelf shine shirt shock shoes short skill sleep slice small smart smile smoke snake solid sound south space
spice spoon sport stage stand stone storm story sugar sweet table taste teach thank think tiger toast today tooth touch
tower track train truck trust truth uncle under union until upper urban usual value video visit voice waste watch water
wheel white whole woman world worry wrist write wrong young youth zebra
""".split()  # noqa: SIM905
)
"""The words without duplicates, in alphabetical order."""
