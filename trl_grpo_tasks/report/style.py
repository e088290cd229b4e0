"""The style of report pages (light and dark), the script that enlarges samples, and the HTML around a page."""

import html

RELOAD_SECONDS = 60

STYLE = """
:root{color-scheme:light dark;--ink:#1d2430;--soft:#5d6878;--line:#dfe3e9;--paper:#fff;--back:#f6f7f9;--good:#16835a;
--bad:#c2452f;--c0:#2a6fdb;--c1:#d9622b;--c2:#16835a;--c3:#8a4fc7;--c4:#b8860b;--c5:#4a8f9e}
@media(prefers-color-scheme:dark){:root{--ink:#e6e9ef;--soft:#9aa5b4;--line:#323a46;--paper:#1b2029;--back:#12161c;
--good:#46c08d;--bad:#ef7c66;--c0:#6ea4f7;--c1:#f0925f;--c2:#46c08d;--c3:#b98bea;--c4:#dcb14a;--c5:#7cc3d3}}
*{box-sizing:border-box}
body{font:16px/1.5 system-ui,-apple-system,'Segoe UI',sans-serif;margin:0;color:var(--ink);background:var(--back)}
main{max-width:76rem;margin:0 auto;padding:1.5rem 1rem 4rem}
h1{font-size:1.7rem;line-height:1.2;margin:.2rem 0 .3rem}h2{font-size:1.25rem;margin:2.4rem 0 .6rem}
h3{font-size:1rem;margin:1.2rem 0 .5rem}p{margin:.4rem 0}.soft,figcaption code{color:var(--soft)}
code,pre{font-family:ui-monospace,Menlo,Consolas,monospace}code{overflow-wrap:anywhere}
.state{display:inline-block;font-size:.8rem;border-radius:1rem;padding:.1rem .7rem;border:1px solid currentColor}
.state.done,.up,.better{color:var(--good)}.state.going{color:var(--c0)}.down,.worse{color:var(--bad)}
.same{color:var(--soft)}
.tiles{display:grid;gap:.7rem;grid-template-columns:repeat(auto-fit,minmax(11rem,1fr));margin:1.2rem 0}
.tile,figure,.pair{background:var(--paper);border:1px solid var(--line);border-radius:.7rem}
.tile{padding:.7rem .8rem}.tile small{display:block;color:var(--soft)}.tile b{font-size:1.1rem;white-space:nowrap}
.tile.main{grid-column:span 2}.tile.main b{font-size:2.5rem;line-height:1.15}
.facts{display:flex;flex-wrap:wrap;gap:.2rem 1.4rem;margin:.6rem 0;padding:0;list-style:none;font-size:.95rem}
.scroll{overflow-x:auto}table{border-collapse:collapse;font-size:.92rem;font-variant-numeric:tabular-nums}
td small{white-space:nowrap;color:var(--soft);margin-left:.5rem}
td,th{padding:.22rem .8rem;border-bottom:1px solid var(--line);text-align:right}td:first-child,th:first-child
{text-align:left;padding-left:0}
.charts{display:grid;gap:.8rem;grid-template-columns:repeat(auto-fill,minmax(min(100%,17rem),1fr))}
.beside{display:grid;gap:1rem 2rem;
grid-template-columns:repeat(auto-fit,minmax(min(100%,34rem),1fr))}
figure{margin:0;padding:.7rem;min-width:0}
figcaption{font-size:.85rem;overflow-wrap:anywhere}.chart figcaption{display:flex;flex-wrap:wrap;gap:0 .7rem}
.chart figcaption code{font-size:.72rem;width:100%}svg{display:block;width:100%;height:auto;margin-top:.3rem}
svg text{font-size:12px;fill:var(--soft)}svg .grid{stroke:var(--line)}polyline{fill:none;stroke-width:2;
stroke-linejoin:round}.raw{stroke-width:1;opacity:.35}.band{opacity:.13}.hit{fill:transparent}
g:hover .hit{fill:var(--ink);
fill-opacity:.18}.legend{display:flex;flex-wrap:wrap;gap:.1rem 1rem;font-size:.85rem}
.legend i{display:inline-block;width:.9rem;height:.25rem;border-radius:2px;margin-right:.4rem;vertical-align:middle}
.s0{stroke:var(--c0)}.s1{stroke:var(--c1)}.s2{stroke:var(--c2)}.s3{stroke:var(--c3)}.s4{stroke:var(--c4)}
.s5{stroke:var(--c5)}.f0{fill:var(--c0)}.f1{fill:var(--c1)}.f2{fill:var(--c2)}.f3{fill:var(--c3)}.f4{fill:var(--c4)}
.f5{fill:var(--c5)}.k0{background:var(--c0)}.k1{background:var(--c1)}.k2{background:var(--c2)}
.k3{background:var(--c3)}.k4{background:var(--c4)}.k5{background:var(--c5)}
.pairs{display:grid;gap:1rem;grid-template-columns:repeat(auto-fill,minmax(min(100%,30rem),1fr))}
.pair{padding:.8rem;min-width:0}.pair header{font-size:.9rem;margin-bottom:.5rem;overflow-wrap:anywhere}
.sides{display:grid;grid-template-columns:1fr 1fr;gap:.6rem;align-items:start}.sides.one{grid-template-columns:1fr}
.sides.one .picture{max-width:26rem;margin:auto}
.sides.one .picture img{max-height:22rem;object-fit:contain}
.samples{display:grid;gap:.8rem;grid-template-columns:repeat(auto-fill,minmax(min(100%,14rem),1fr))}
.sample{padding:.5rem;cursor:zoom-in;border-top:3px solid var(--line)}.sample.good{border-top-color:var(--good)}
.sample.bad{border-top-color:var(--bad)}.sample:focus-visible{outline:2px solid var(--c0)}
.picture{max-height:22rem;overflow:hidden;border-radius:.4rem}.picture img{display:block;width:100%;height:auto}
.paper{background:#fff;color:#1d2430;padding:.5rem;font-size:.82rem;overflow-wrap:anywhere;color-scheme:light}
.paper pre,pre{white-space:pre-wrap;overflow-wrap:anywhere;margin:0;font-size:.82rem}.paper table{font-size:inherit}
.paper td,.paper th{border-color:#e3e6ea}
.sides:has(.wide){grid-template-columns:1fr}
.samples:has(.wide){grid-template-columns:repeat(auto-fill,minmax(min(100%,26rem),1fr))}
.sample .why{display:-webkit-box;-webkit-box-orient:vertical;-webkit-line-clamp:3;overflow:hidden}
.note{color:var(--soft);font-style:italic;font-size:.85rem}.sample figcaption{margin-top:.4rem}
pre.block{background:var(--paper);border:1px solid var(--line);border-radius:.5rem;padding:.7rem}
summary{cursor:pointer;font-weight:600;margin:.4rem 0}
dialog{border:0;border-radius:.7rem;padding:1rem;background:var(--paper);color:var(--ink);width:min(96vw,62rem);
max-height:96vh}dialog::backdrop{background:rgba(0,0,0,.65)}dialog .picture{max-height:none}
dialog img{max-height:80vh;object-fit:contain}
dialog .paper{font-size:1rem}dialog button{float:right;font:inherit;border:1px solid var(--line);border-radius:.4rem;
background:none;color:inherit;cursor:pointer}
@media(max-width:30rem){main{padding:1rem .7rem 3rem}h1{font-size:1.35rem}td small{display:block;margin:0}
.tile.main b{font-size:2rem}.tiles{grid-template-columns:1fr 1fr}.sides{gap:.3rem}.sample{padding:.3rem}
.pair{padding:.5rem}.samples{grid-template-columns:1fr 1fr}.text .sides,.text.samples{grid-template-columns:1fr}}
"""

# A click on a sample copies it into the dialog; arrow keys show its neighbours, Escape closes the dialog.
SCRIPT = """
const large=document.getElementById('large'),samples=[...document.querySelectorAll('.sample')];let at=0;
function show(i){at=(i+samples.length)%samples.length;const s=samples[at],pair=s.closest('.pair'),
head=pair?pair.querySelector('header').cloneNode(true):document.createElement('header');
large.querySelector('div').replaceChildren(head,...[...s.childNodes].map(n=>n.cloneNode(true)));
if(!large.open)large.showModal()}
samples.forEach((s,i)=>{s.addEventListener('click',()=>show(i));
s.addEventListener('keydown',e=>{if(e.key==='Enter')show(i)})});
large.addEventListener('click',e=>{if(e.target===large||e.target.tagName==='BUTTON')large.close()});
large.addEventListener('keydown',e=>{if(e.key==='ArrowRight')show(at+1);if(e.key==='ArrowLeft')show(at-1)});
"""


# Reloads the page of a running job, but never while a sample is enlarged or text is selected, and restores what the
# reader saw: open details, and the place relative to the nearest heading, since content above it may have grown.
RELOAD_SCRIPT = f"""
const heads=[...document.querySelectorAll('h1,h2,summary')],details=[...document.querySelectorAll('details')];
const seen=JSON.parse(sessionStorage.getItem(location.pathname)||'null');history.scrollRestoration='manual';
if(seen){{details.forEach((d,i)=>d.open=seen.open.includes(i));const head=heads.find(h=>h.textContent===seen.head);
if(head)scrollTo(0,scrollY+head.getBoundingClientRect().top-seen.top)}}
addEventListener('pagehide',()=>{{
const head=heads.filter(h=>h.getBoundingClientRect().top<innerHeight/2).pop()||heads[0];
sessionStorage.setItem(location.pathname,JSON.stringify({{head:head.textContent,top:head.getBoundingClientRect().top,
open:details.flatMap((d,i)=>d.open?[i]:[])}}))}});
setInterval(()=>{{if(!document.querySelector('dialog[open]')&&getSelection().isCollapsed)location.reload()}},
{1000 * RELOAD_SECONDS})
"""


def page(title: str, body: str, script: str = "", reloads: bool = False) -> str:
    """Return a complete HTML page. With `reloads`, the browser reloads it every minute, to follow a running job."""
    script += RELOAD_SCRIPT if reloads else ""
    reload = f"<noscript><meta http-equiv=refresh content={RELOAD_SECONDS}></noscript>" if reloads else ""
    return (
        "<!doctype html><html lang=en><head><meta charset=utf-8>"
        f"<meta name=viewport content='width=device-width,initial-scale=1'>{reload}"
        f"<title>{html.escape(title)}</title><style>{STYLE}</style></head>"
        f"<body><main>{body}</main><script>{script}</script></body></html>\n"
    )
