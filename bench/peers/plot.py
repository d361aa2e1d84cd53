"""One SVG: the share of the ceiling that each peer reaches, by case; a panel for each dtype and head shape."""

from xml.sax.saxutils import escape

# Name, colour and the beginning of the peers' names; of several, the quickest one of the case is shown.
FAMILIES = (
    ("headway", "#c1121f", "headway"),
    ("vLLM", "#1d6fb8", "vllm"),
    ("PyTorch", "#e08e0b", "torch"),
    ("ggml", "#3b8f4e", "ggml"),
)
ROW, LEFT, WIDTH, GAP, TOP, HEAD = 17, 150, 300, 56, 60, 26
MOST = 1.25


def svg(run):
    results = [r for r in run["attention"] if r["share_of_ceiling"]]
    dtypes = list(dict.fromkeys(r["dtype"] for r in results))
    shapes = list(dict.fromkeys(r["heads"] for r in results))
    names = list(dict.fromkeys(r["case"] for r in results))
    panel = HEAD + ROW * len(names) + 34
    width = LEFT + (WIDTH + GAP) * len(shapes)
    height = TOP + panel * len(dtypes) + 10
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}" font-family="sans-serif" font-size="11">',
        f'<rect width="{width}" height="{height}" fill="white"/>',
        '<text x="10" y="20" font-size="15" font-weight="bold">Share of the machine\'s ceiling, by case</text>',
        f'<text x="10" y="36" fill="#555">{escape(run["cpu"])}, {run["threads"]} threads, {escape(run["date"])}. '
        "Ceiling: random 64 KiB reads for decode and write, multiply-adds (or reads) for the others.</text>",
    ]
    at = 10
    for name, colour, _ in FAMILIES:
        out.append(f'<circle cx="{at + 4}" cy="48" r="4" fill="{colour}"/><text x="{at + 12}" y="52">{name}</text>')
        at += 80
    for i, dtype in enumerate(dtypes):
        for j, heads in enumerate(shapes):
            mine = [r for r in results if (r["dtype"], r["heads"]) == (dtype, heads)]
            x, y = LEFT + j * (WIDTH + GAP), TOP + i * panel
            out += one_panel(mine, names, f"{heads} {dtype}", x, y, labels=j == 0)
    return "\n".join([*out, "</svg>"]) + "\n"


def one_panel(results, names, title, x, y, labels):
    bottom = y + HEAD + ROW * len(names)
    out = [f'<text x="{x}" y="{y + 18}" font-weight="bold">{escape(title)}</text>']
    for tick in (0, 0.25, 0.5, 0.75, 1.0, 1.25):
        tx = x + WIDTH * tick / MOST
        colour = "#888" if tick == 1 else "#ddd"
        out.append(f'<line x1="{tx:.1f}" x2="{tx:.1f}" y1="{y + HEAD}" y2="{bottom}" stroke="{colour}"/>')
        out.append(f'<text x="{tx:.1f}" y="{bottom + 14}" text-anchor="middle" fill="#555">{tick:.0%}</text>')
    for k, name in enumerate(names):
        cy = y + HEAD + ROW * (k + 0.5)
        if labels:
            out.append(f'<text x="{x - 8}" y="{cy + 4:.1f}" text-anchor="end">{escape(name)}</text>')
        shares = {}
        for r in results:
            if r["case"] == name:
                for family, _, prefix in FAMILIES:
                    if r["peer"].startswith(prefix):
                        shares[family] = max(shares.get(family, 0), r["share_of_ceiling"])
        if not shares:
            continue
        ends = [x + WIDTH * min(s, MOST) / MOST for s in (min(shares.values()), max(shares.values()))]
        out.append(f'<line x1="{ends[0]:.1f}" x2="{ends[1]:.1f}" y1="{cy:.1f}" y2="{cy:.1f}" stroke="#ccc"/>')
        for family, colour, _ in reversed(FAMILIES):
            if family in shares:
                cx = x + WIDTH * min(shares[family], MOST) / MOST
                if shares[family] > MOST and family == max(shares, key=shares.get):
                    # A cache that stays in the processor's own is read quicker than memory.
                    out.append(
                        f'<text x="{cx + 8:.1f}" y="{cy + 4:.1f}" fill="{colour}" font-size="9">{shares[family]:.0%}</text>'
                    )
                size = 5 if family == "headway" else 4
                out.append(
                    f'<circle cx="{cx:.1f}" cy="{cy:.1f}" r="{size}" fill="{colour}"><title>{family} {escape(name)}: {shares[family]:.0%}</title></circle>'
                )
    return out
